"""`fused_moe` in plain torch, from the raw arguments: no wait for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops.gemm.grouped.args import plain_grouped_args
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.moe import moe_align, moe_unpermute
from tilewright.ops.moe.fused.args import FusedMoeArgs, FusedMoeBackwardArgs


def experts(args: FusedMoeArgs) -> Tensor:
    """Sort, gather, two grouped products, weighted sum."""
    x, w1, w2, weights, ids, expert_map, activation = args
    slots, positions, _, ends = moe_align.reference(ids, w1.shape[0], expert_map=expert_map)
    is_local = (torch.arange(slots.shape[0], device=x.device) < ends[-1])[:, None]
    gathered = x[slots.to(torch.int64) // max(1, ids.shape[1])]
    both, inner = _product(gathered, w1, ends, is_local), w2.shape[2]
    gate, up = both[:, :inner], both[:, inner:]
    hidden = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    return moe_unpermute.combined(_product(hidden, w2, ends, is_local), weights, positions)


def _product(rows: Tensor, w: Tensor, ends: Tensor, is_local: Tensor) -> Tensor:
    """Rows of each group times its w^T; 0 outside of the groups."""
    product = rows_product(plain_grouped_args(rows[None], w.mT, None, ends, 1, rows.dtype))[0]
    return torch.where(is_local, product, 0)


def experts_backward(args: FusedMoeBackwardArgs) -> tuple[Tensor, ...]:
    """Gradients of x, w1, w2 and topk_weights; those that are not needed are empty."""

    def forward(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        return experts(FusedMoeArgs(x, w1, w2, weights, args.topk_ids, args.expert_map, args.activation))

    gradients = vjp(forward, (args.x, args.w1, args.w2, args.topk_weights), (args.dy,))
    needed = args.need_dx, args.need_dw1, args.need_dw2, args.need_dweights
    return tuple(g if need else g.new_empty(0) for g, need in zip(gradients, needed, strict=True))
