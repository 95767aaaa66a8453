"""`fused_moe_bias` in plain torch, from the raw arguments: no wait for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops.activation.gated import swigluoai
from tilewright.ops.gemm.grouped.args import plain_grouped_args
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.moe import assignment, moe_align, moe_unpermute
from tilewright.ops.moe.fused_bias.args import FusedMoeBiasArgs, FusedMoeBiasBackwardArgs


def experts(args: FusedMoeBiasArgs) -> Tensor:
    """Sort, gather, two grouped products with their biases, weighted sum."""
    x, w1, w2, weights, ids, count = *args[:5], args.w1.shape[0]
    slots, positions, _, ends = moe_align.reference(ids, count, expert_map=args.expert_map)
    slots = slots.to(torch.int64)
    is_local = (torch.arange(slots.shape[0], device=x.device) < ends[-1])[:, None]
    expert = assignment.local_experts(ids, args.expert_map, count).flatten()[slots].clamp(max=count - 1)

    def product(rows: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = rows_product(plain_grouped_args(rows[None], w.mT, None, ends, 1, rows.dtype))[0]
        return torch.where(is_local, y if bias is None else y + bias[expert], 0)

    both = product(x[slots // max(1, ids.shape[1])], w1, args.w1_bias)
    y = product(gated(both, args.activation, args.interleaved, args.alpha, args.limit), w2, args.w2_bias)
    return moe_unpermute.combined(y, weights, positions)


def gated(both: Tensor, activation: str, interleaved: bool, alpha: float, limit: float) -> Tensor:
    """The gated columns (..., I) of gates and ups (..., 2 I)."""
    inner = both.shape[-1] // 2
    # Slices: the gradient of `chunk` is a `cat`, which autocast on a CPU refuses in float16
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else (both[..., :inner], both[..., inner:])
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate, approximate="tanh") * up
    return swigluoai(gate, up, alpha, limit)


def experts_backward(args: FusedMoeBiasBackwardArgs) -> tuple[Tensor, ...]:
    """Gradients of `DIFFERENTIATED`; empty for those of x and weights that are not needed, and of an absent bias."""
    forward = args.forward
    names = [name for name in DIFFERENTIATED if getattr(forward, name) is not None]

    def run(*tensors: Tensor) -> Tensor:
        return experts(forward._replace(**dict(zip(names, tensors, strict=True))))  # type: ignore[arg-type]

    gradients = dict(zip(names, vjp(run, tuple(getattr(forward, n) for n in names), (args.dy,)), strict=True))
    return tuple(
        gradients[name] if getattr(args, f"need_d{name}", name in gradients) else args.x.new_empty(0)
        for name in DIFFERENTIATED
    )


DIFFERENTIATED = ("x", "w1", "w2", "topk_weights", "w1_bias", "w2_bias")
