"""The steps of `fused_moe` around its two products, which every backend has for itself: order, combine, and memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.ops.moe.fused.args import FusedMoeArgs
from tilewright.ops.moe.kernels.triton import moe_align, moe_permute, moe_unpermute
from tilewright.ops.moe.moe_align import MoeAlignArgs, align_bucket
from tilewright.ops.moe.moe_permute import MoePermuteArgs, order_bucket
from tilewright.ops.moe.moe_unpermute import MoeUnpermuteArgs


class Order(NamedTuple):
    """What `moe_align` makes, and how many rows of an expert to choose kernels for: not those of this call, as a batch
    must not change the order of sums.
    """

    slots: Tensor
    positions: Tensor
    starts: Tensor
    ends: Tensor
    expected_rows: int


def order(args: FusedMoeArgs, expected_rows: int) -> Order:
    """Sort the slots by expert."""
    tokens, k = args.topk_ids.shape
    experts, device = args.w1.shape[0], args.x.device
    slots = scratch((tokens * k,), torch.int32, device)
    positions = scratch((tokens, k), torch.int32, device)
    starts, ends = (scratch((experts,), torch.int32, device) for _ in range(2))
    aligned = MoeAlignArgs(args.topk_ids, args.expert_map, experts)
    config = moe_align.configure(align_bucket(aligned), args.topk_ids.dtype)
    moe_align.launch((slots, positions, starts, ends), aligned, config)
    return Order(slots, positions, starts, ends, expected_rows)


def gather(args: FusedMoeArgs, rows: Order) -> Tensor:
    """(T * k, H): rows of tokens in this order."""
    gathered = scratch((rows.slots.shape[0], args.x.shape[1]), args.x.dtype, args.x.device)
    permuted = MoePermuteArgs(args.x, rows.slots, rows.positions)
    config = moe_permute.configure(order_bucket(args.x.shape[1], rows.positions), args.x.dtype)
    moe_permute.launch((gathered,), permuted, config)
    return gathered


def combine(out: Tensor, y: Tensor, args: FusedMoeArgs, rows: Order) -> None:
    """out[t] = the weighted sum of the rows of token t in y (T * k, H)."""
    unpermuted = MoeUnpermuteArgs(y, args.topk_weights, rows.slots, rows.positions)
    config = moe_unpermute.configure(order_bucket(y.shape[1], rows.positions), args.x.dtype)
    moe_unpermute.launch((out,), unpermuted, config)
