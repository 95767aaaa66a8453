"""What `fused_moe_fp8` refuses."""

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.gemm.operands import FP8
from tilewright.ops.moe import assignment
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args
from tilewright.ops.quant.layout import BLOCK

OP = "fused_moe_fp8"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROWS = (torch.bfloat16, torch.float16)


def check(args: FusedMoeFp8Args) -> None:
    """Raise InputError for what the docstring of `fused_moe_fp8` excludes."""
    x, w1, w2, w1_scale, w2_scale, weights, ids, expert_map = args
    for name, t, dims, form, dtypes in (
        ("x", x, 2, "(T, H)", ROWS),
        ("w1", w1, 3, "(E, 2 I, H)", (FP8,)),
        ("w2", w2, 3, "(E, H, I)", (FP8,)),
        ("w1_scale", w1_scale, 3, "(E, 2 I blocks, H blocks)", (torch.float32,)),
        ("w2_scale", w2_scale, 3, "(E, H blocks, I blocks)", (torch.float32,)),
        ("topk_weights", weights, 2, "(T, k)", FLOATS),
    ):
        if not isinstance(t, Tensor):
            raise InputError(f"{OP}: {name} is a {type(t).__name__}; needs a torch.Tensor {form}.")
        if t.dim() != dims:
            raise InputError(f"{OP}: {name} is {tuple(t.shape)}; needs {form}.")
        if t.dtype not in dtypes:
            allowed = " or ".join(str(dtype) for dtype in dtypes[:3])
            raise InputError(f"{OP}: {name} is {t.dtype}; needs {allowed}. per_block_cast_to_fp8 casts weights.")
        if t.device != x.device:
            raise InputError(f"{OP}: {name} is on {t.device}, x on {x.device}. Move them to one device.")
    experts, width, inner = w2.shape
    if x.shape[1] != width or tuple(w1.shape) != (experts, 2 * inner, width) or experts == 0:
        raise InputError(
            f"{OP}: x is {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}; "
            "needs (T, H), (E, 2 I, H) and (E, H, I), E at least 1."
        )
    for name, scale, (rows, depth) in (
        ("w1_scale", w1_scale, (2 * inner, width)),
        ("w2_scale", w2_scale, (width, inner)),
    ):
        shape = (experts, *BLOCK.shape(rows, depth))
        if tuple(scale.shape) != shape:
            raise InputError(f"{OP}: {name} is {tuple(scale.shape)}; needs {shape}, one for 128 x 128 of a weight.")
    assignment.check_experts(OP, ids, expert_map, experts)
    if ids.device != x.device:
        raise InputError(f"{OP}: topk_ids is on {ids.device}, x on {x.device}. Move them to one device.")
    if weights.shape != ids.shape or ids.shape[0] != x.shape[0]:
        raise InputError(
            f"{OP}: topk_weights is {tuple(weights.shape)}, topk_ids {tuple(ids.shape)}; "
            f"needs two of ({x.shape[0]}, k)."
        )
    wanted_by = (x, w1_scale, w2_scale, weights)
    if torch.is_grad_enabled() and any(t.requires_grad for t in wanted_by):
        raise InputError(f"{OP}: a gradient is wanted of float8 experts, which have none. Use torch.no_grad().")
