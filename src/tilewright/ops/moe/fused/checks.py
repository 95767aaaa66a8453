"""What `fused_moe` refuses."""

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.moe import assignment
from tilewright.ops.moe.fused.args import FusedMoeArgs

ACTIVATIONS = ("silu", "gelu")
QUANTS = (None, "fp8_block")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check(args: FusedMoeArgs) -> None:
    """Raise InputError for what the docstring of `fused_moe` excludes."""
    op, (x, w1, w2, weights, ids, expert_map, activation) = "fused_moe", args
    for name, t, dims, form in (
        ("x", x, 2, "(T, H)"),
        ("w1", w1, 3, "(E, 2 I, H)"),
        ("w2", w2, 3, "(E, H, I)"),
        ("topk_weights", weights, 2, "(T, k)"),
    ):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor {form}.")
        if t.dim() != dims:
            raise InputError(f"{op}: {name} is {tuple(t.shape)}; needs {form}.")
        if t.dtype not in FLOATS:
            raise InputError(f"{op}: {name} is {t.dtype}; needs one of bfloat16, float16, float32.")
        if t.device != x.device:
            raise InputError(f"{op}: {name} is on {t.device}, x on {x.device}. Move them to one device.")
    if not x.dtype == w1.dtype == w2.dtype:
        raise InputError(f"{op}: x is {x.dtype}, w1 {w1.dtype}, w2 {w2.dtype}; they must have one dtype.")
    experts, width, inner = w2.shape
    if x.shape[1] != width or tuple(w1.shape) != (experts, 2 * inner, width) or experts == 0:
        raise InputError(
            f"{op}: x is {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}; "
            "needs (T, H), (E, 2 I, H) and (E, H, I), E at least 1."
        )
    assignment.check_experts(op, ids, expert_map, experts)
    if ids.device != x.device:
        raise InputError(f"{op}: topk_ids is on {ids.device}, x on {x.device}. Move them to one device.")
    if weights.shape != ids.shape or ids.shape[0] != x.shape[0]:
        raise InputError(
            f"{op}: topk_weights is {tuple(weights.shape)}, topk_ids {tuple(ids.shape)}; "
            f"needs two of ({x.shape[0]}, k)."
        )
    if activation not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS))
        raise InputError(f"{op}: activation is {activation!r}; allowed are {allowed}.")


def scales_of(
    quant: str | None, activation: str, w1_scale: Tensor | None, w2_scale: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return the scales of a quantised form, None without `quant`; raise InputError for a `quant` that there is not,
    and for what does not go with it.
    """
    if quant not in QUANTS:
        allowed = ", ".join(map(repr, QUANTS))
        raise InputError(f"fused_moe: quant is {quant!r}; allowed are {allowed}.")
    if quant is None:
        if w1_scale is not None or w2_scale is not None:
            raise InputError('fused_moe: scales of weights without quant; needs quant="fp8_block", or no scales.')
        return None
    if w1_scale is None or w2_scale is None:
        raise InputError(
            f"fused_moe: quant is {quant!r} without w1_scale or w2_scale; per_block_cast_to_fp8 gives both."
        )
    if activation != "silu":
        raise InputError(f'fused_moe: quant is {quant!r} with activation {activation!r}; needs "silu".')
    return w1_scale, w2_scale
