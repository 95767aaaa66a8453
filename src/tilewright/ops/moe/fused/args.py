"""Arguments and the bucket of `fused_moe`."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.operands import copyable


class FusedMoeArgs(NamedTuple):
    x: Tensor  # (T, H)
    w1: Tensor  # (E, 2 I, H)
    w2: Tensor  # (E, H, I)
    topk_weights: Tensor  # (T, k)
    topk_ids: Tensor  # (T, k)
    expert_map: Tensor | None  # (all experts,) int32
    activation: str


class FusedMoeBackwardArgs(NamedTuple):
    dy: Tensor  # (T, H)
    x: Tensor  # (T, H)
    w1: Tensor  # (E, 2 I, H)
    w2: Tensor  # (E, H, I)
    topk_weights: Tensor  # (T, k)
    topk_ids: Tensor  # (T, k)
    expert_map: Tensor | None  # (all experts,) int32
    activation: str
    need_dx: bool
    need_dw1: bool
    need_dw2: bool
    need_dweights: bool


class FusedMoeBucket(NamedTuple):
    """T in powers of two, the exact sizes of one expert."""

    T: int
    K: int
    E: int
    H: int
    I: int  # noqa: E741 - the width of an expert, as papers write it
    gelu: int
    rows: int  # whether rows of w1 and of w2 are contiguous
    aligned: int  # whether TMA reads both, the experts of w1 one after the other


def expected_rows(bucket: FusedMoeBucket) -> int:
    """How many rows an expert has on average, rounded up to a power of two."""
    return mean_rows(bucket.T, bucket.K, bucket.E)


def mean_rows(tokens: int, k: int, experts: int) -> int:
    """How many rows an expert has on average, rounded up to a power of two."""
    return row_bucket(-(-tokens * k // max(1, experts)))


def fused_bucket(args: FusedMoeArgs | FusedMoeBackwardArgs) -> FusedMoeBucket:
    """What a choice of kernel may depend on."""
    x, w1, w2, (experts, width, inner) = args.x, args.w1, args.w2, args.w2.shape
    rows = all(t.shape[-1] <= 1 or t.stride(-1) == 1 for t in (w1, w2))
    vector = 16 // x.element_size()
    aligned = (
        rows
        and w1.is_contiguous()
        and copyable(w1)
        and copyable(w2)
        and hint(width) % vector == hint(inner) % vector == 0
    )
    return FusedMoeBucket(
        row_bucket(x.shape[0]),
        hint(args.topk_ids.shape[1]),
        hint(experts),
        hint(width),
        hint(inner),
        int(args.activation != "silu"),
        int(rows),
        int(aligned),
    )
