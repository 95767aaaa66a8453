"""Arguments and the bucket of `fused_moe_fp8`."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.moe.fused.args import FusedMoeArgs
from tilewright.ops.quant.layout import BLOCK


class FusedMoeFp8Args(NamedTuple):
    x: Tensor  # (T, H)
    w1: Tensor  # (E, 2 I, H) e4m3
    w2: Tensor  # (E, H, I) e4m3
    w1_scale: Tensor  # (E, 2 I blocks, H blocks) float32
    w2_scale: Tensor  # (E, H blocks, I blocks) float32
    topk_weights: Tensor  # (T, k)
    topk_ids: Tensor  # (T, k)
    expert_map: Tensor | None  # (all experts,) int32


class FusedMoeFp8Bucket(NamedTuple):
    """T in powers of two, the exact sizes of one expert."""

    T: int
    K: int
    E: int
    H: int
    I: int  # noqa: E741 - the width of an expert, as papers write it
    aligned: int  # whether TMA reads both weights, and scales lie as casts write them


def unscaled(args: FusedMoeFp8Args) -> FusedMoeArgs:
    """Returns the arguments that steps around the products read."""
    return FusedMoeArgs(args.x, args.w1, args.w2, args.topk_weights, args.topk_ids, args.expert_map, "silu")


def why_not_scales(args: FusedMoeFp8Args) -> str | None:
    """Why a kernel cannot read the scales where they lie; None if it can."""
    for name, scale, (rows, depth) in (
        ("w1_scale", args.w1_scale, args.w1.shape[1:]),
        ("w2_scale", args.w2_scale, args.w2.shape[1:]),
    ):
        reason = BLOCK.mismatch(scale, rows, depth)
        if reason is not None:
            return f"reads scales as they lie, and those of {name} {reason}"
    return None


def fp8_bucket(args: FusedMoeFp8Args) -> FusedMoeFp8Bucket:
    """What a choice of kernel may depend on."""
    w1, w2, (experts, width, inner) = args.w1, args.w2, args.w2.shape
    rows = all(t.shape[-1] <= 1 or t.stride(-1) == 1 for t in (w1, w2))
    aligned = rows and copyable(w1) and copyable(w2) and hint(width) % 16 == hint(inner) % 16 == 0
    return FusedMoeFp8Bucket(
        row_bucket(args.x.shape[0]),
        hint(args.topk_ids.shape[1]),
        hint(experts),
        hint(width),
        hint(inner),
        int(aligned and why_not_scales(args) is None),
    )
