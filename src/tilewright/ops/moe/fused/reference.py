"""`fused_moe` in plain torch, from the raw arguments: no wait for the device."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops.gemm.grouped.args import plain_grouped_args
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.moe import moe_align, moe_unpermute
from tilewright.ops.moe.fused.args import FusedMoeArgs, FusedMoeBackwardArgs
from tilewright.ops.rows import accumulate_dtype


def experts(args: FusedMoeArgs) -> Tensor:
    """Sort, gather, two grouped products, weighted sum."""
    order = _order(args)
    y = _product(_hidden(args, order), args.w2, order)
    return moe_unpermute.combined(y, args.topk_weights, order.positions)


class _Order(NamedTuple):
    """Rows by expert: the token of each, where each slot's row is, where groups end, whether a row has an expert."""

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    is_local: Tensor


def _order(args: FusedMoeArgs) -> _Order:
    ids = args.topk_ids
    slots, positions, _, ends = moe_align.reference(ids, args.w1.shape[0], expert_map=args.expert_map)
    is_local = (torch.arange(slots.shape[0], device=ids.device) < ends[-1])[:, None]
    return _Order(slots.to(torch.int64) // max(1, ids.shape[1]), positions, ends, is_local)


def _hidden(args: FusedMoeArgs, order: _Order) -> Tensor:
    """The gated first product, (S, I)."""
    both, inner = _product(args.x[order.tokens], args.w1, order), args.w2.shape[2]
    return gated(both[:, :inner], both[:, inner:], args.activation)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _product(rows: Tensor, w: Tensor, order: _Order) -> Tensor:
    """Rows of each group times its w^T; 0 outside of the groups."""
    product = rows_product(plain_grouped_args(rows[None], w.mT, None, order.ends, 1, rows.dtype))[0]
    return torch.where(order.is_local, product, 0)


def experts_backward(args: FusedMoeBackwardArgs) -> tuple[Tensor, ...]:
    """Gradients of x, w1, w2 and topk_weights; those that are not needed are empty.

    That of a weight is the sum over I of hidden * (dy w2), as SonicMoE has it, which needs no second product.
    """

    def forward(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        return experts(FusedMoeArgs(x, w1, w2, weights, args.topk_ids, args.expert_map, args.activation))

    gradients = list(vjp(forward, (args.x, args.w1, args.w2, args.topk_weights), (args.dy,)))
    if args.need_dweights and not any(isinstance(g, Tensor) and g.requires_grad for g in gradients):
        gradients[3] = _dweights(args)
    needed = args.need_dx, args.need_dw1, args.need_dw2, args.need_dweights
    return tuple(g if need else g.new_empty(0) for g, need in zip(gradients, needed, strict=True))


def _dweights(args: FusedMoeBackwardArgs) -> Tensor:
    plain = FusedMoeArgs(args.x, args.w1, args.w2, args.topk_weights, args.topk_ids, args.expert_map, args.activation)
    order = _order(plain)
    sum_dtype = accumulate_dtype(args.x.dtype)
    dhidden = _product(args.dy[order.tokens], args.w2.mT, order)
    sums = (_hidden(plain, order).to(sum_dtype) * dhidden.to(sum_dtype)).sum(-1)
    chosen = torch.where(order.positions >= 0, sums[order.positions.to(torch.int64).clamp(min=0)], 0)
    return chosen.to(args.topk_weights.dtype)
