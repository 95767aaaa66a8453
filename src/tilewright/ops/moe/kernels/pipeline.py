"""The steps of `fused_moe` around its two products, which every backend has for itself: order, combine, and memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.ops.activation.kernels.triton import silu_fp8
from tilewright.ops.gemm.operands import FP8
from tilewright.ops.moe.fused.args import FusedMoeArgs
from tilewright.ops.moe.kernels.triton import moe_align, moe_permute, moe_unpermute
from tilewright.ops.moe.kernels.triton.cast_rows import cast_rows, scale_memory
from tilewright.ops.moe.moe_align import MoeAlignArgs, align_bucket
from tilewright.ops.moe.moe_permute import MoePermuteArgs, order_bucket
from tilewright.ops.moe.moe_unpermute import MoeUnpermuteArgs
from tilewright.ops.rows import RowsBucket


class Order(NamedTuple):
    """What `moe_align` makes, and how many rows of an expert to choose kernels for: not those of this call, as a batch
    must not change the order of sums.
    """

    slots: Tensor
    positions: Tensor
    starts: Tensor
    ends: Tensor
    expected_rows: int


def order_memory(args: FusedMoeArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, positions, starts and ends."""
    (tokens, k), experts = args.topk_ids.shape, args.w1.shape[0]
    shapes = (tokens * k,), (tokens, k), (experts,), (experts,)
    slots, positions, starts, ends = (scratch(shape, torch.int32, args.x.device) for shape in shapes)
    return slots, positions, starts, ends


def order(args: FusedMoeArgs, expected_rows: int) -> Order:
    """Sort the slots by expert."""
    memory = order_memory(args)
    aligned = MoeAlignArgs(args.topk_ids, args.expert_map, args.w1.shape[0])
    config = moe_align.configure(align_bucket(aligned), args.topk_ids.dtype)
    moe_align.launch(memory, aligned, config)
    return Order(*memory, expected_rows)


def order_and_rows(args: FusedMoeArgs, expected_rows: int, *, cast: bool) -> tuple[Order, Tensor, Tensor | None]:
    """Sort the slots by expert; rows of tokens (T * k, H) in this order, cast to e4m3 with scales where asked."""
    ordered = order(args, expected_rows)
    if cast:
        return ordered, *cast_rows(args.x, ordered.positions)
    return ordered, gather(args, ordered), None


def gate_and_cast(both: Tensor) -> tuple[Tensor, Tensor]:
    """(q (S, I), scales) of silu(gate) * up, of both (S, 2 I)."""
    rows, columns = both.shape[0], both.shape[1] // 2
    q, scales = scratch((rows, columns), FP8, both.device), scale_memory(rows, columns, both.device)
    silu_fp8.packed(q, scales, both, False, silu_fp8.configure(RowsBucket(rows, columns), both.dtype))
    return q, scales


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
