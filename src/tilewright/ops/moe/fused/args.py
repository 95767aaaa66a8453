"""Arguments and the bucket of `fused_moe`."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket


class FusedMoeArgs(NamedTuple):
    x: Tensor  # (T, H)
    w1: Tensor  # (E, 2 I, H)
    w2: Tensor  # (E, H, I)
    topk_weights: Tensor  # (T, k)
    topk_ids: Tensor  # (T, k)
    expert_map: Tensor | None  # (all experts,) int32
    activation: str


class FusedMoeBucket(NamedTuple):
    """T in powers of two, the exact sizes of one expert."""

    T: int
    K: int
    E: int
    H: int
    I: int  # noqa: E741 - the width of an expert, as papers write it
    aligned: int


def fused_bucket(args: FusedMoeArgs) -> FusedMoeBucket:
    """What a choice of kernel may depend on."""
    x, (experts, width, inner) = args.x, args.w2.shape
    vector = 16 // x.element_size()
    aligned = width % vector == 0 and inner % vector == 0
    return FusedMoeBucket(
        row_bucket(x.shape[0]), hint(args.topk_ids.shape[1]), hint(experts), hint(width), hint(inner), int(aligned)
    )
