"""Arguments and the bucket of `fused_moe_bias`."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.operands import copyable, major_b
from tilewright.ops.moe.fused.args import FusedMoeArgs


class FusedMoeBiasArgs(NamedTuple):
    x: Tensor  # (T, H)
    w1: Tensor  # (E, 2 I, H)
    w2: Tensor  # (E, H, I)
    topk_weights: Tensor  # (T, k)
    topk_ids: Tensor  # (T, k)
    w1_bias: Tensor | None  # (E, 2 I)
    w2_bias: Tensor | None  # (E, H)
    expert_map: Tensor | None  # (all experts,) int32
    activation: str
    interleaved: bool
    alpha: float
    limit: float


class FusedMoeBiasBackwardArgs(NamedTuple):
    dy: Tensor  # (T, H)
    x: Tensor  # (T, H)
    w1: Tensor  # (E, 2 I, H)
    w2: Tensor  # (E, H, I)
    topk_weights: Tensor  # (T, k)
    topk_ids: Tensor  # (T, k)
    w1_bias: Tensor | None  # (E, 2 I)
    w2_bias: Tensor | None  # (E, H)
    expert_map: Tensor | None  # (all experts,) int32
    activation: str
    interleaved: bool
    alpha: float
    limit: float
    need_dx: bool
    need_dw1: bool
    need_dw2: bool

    @property
    def forward(self) -> FusedMoeBiasArgs:
        """The arguments of the forward."""
        return FusedMoeBiasArgs(*tuple(self)[1:13])  # type: ignore[arg-type]


class FusedMoeBiasBucket(NamedTuple):
    """T in powers of two, the exact sizes of one expert."""

    T: int
    K: int
    E: int
    H: int
    I: int  # noqa: E741 - the width of an expert, as papers write it
    along_k: int  # whether rows of w1 and of w2 are contiguous; else their columns may be
    unit: int  # whether each has a unit stride in one of them
    aligned: int  # whether TMA reads both


def bias_bucket(args: FusedMoeBiasArgs | FusedMoeBiasBackwardArgs) -> FusedMoeBiasBucket:
    """What a choice of kernel may depend on."""
    x, w1, w2, (experts, width, inner) = args.x, args.w1, args.w2, args.w2.shape
    along_k = all(t.shape[-1] <= 1 or t.stride(-1) == 1 for t in (w1, w2))
    weights = (w1, w2) if along_k else (w1.mT, w2.mT)
    vector = 16 // x.element_size()
    aligned = all(map(copyable, weights)) and hint(width) % vector == hint(inner) % vector == 0
    return FusedMoeBiasBucket(
        row_bucket(x.shape[0]),
        hint(args.topk_ids.shape[1]),
        hint(experts),
        hint(width),
        hint(inner),
        int(along_k),
        int(all(major_b(t.mT) is not None for t in (w1, w2))),
        int(aligned),
    )


def expected_rows(bucket: FusedMoeBiasBucket) -> int:
    """How many rows an expert has on average, rounded up to a power of two."""
    return row_bucket(-(-bucket.T * bucket.K // max(1, bucket.E)))


def plain(args: FusedMoeBiasArgs) -> FusedMoeArgs:
    """The arguments that order, gather and combine look at."""
    return FusedMoeArgs(args.x, args.w1, args.w2, args.topk_weights, args.topk_ids, args.expert_map, "silu")
