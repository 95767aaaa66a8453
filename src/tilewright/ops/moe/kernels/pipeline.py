"""The steps of `fused_moe` around its two products, which every backend has for itself: order, combine, and memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.ops.moe import moe_align as align_op
from tilewright.ops.moe import moe_permute as permute_op
from tilewright.ops.moe import moe_unpermute as unpermute_op
from tilewright.ops.moe.fused.args import FusedMoeArgs
from tilewright.ops.moe.kernels.triton import moe_align, moe_permute, moe_unpermute
from tilewright.ops.moe.moe_align import MoeAlignArgs
from tilewright.ops.moe.moe_permute import MoePermuteArgs
from tilewright.ops.moe.moe_unpermute import MoeUnpermuteArgs


class Order(NamedTuple):
    """What `moe_align` makes, and how many rows an expert has on average."""

    slots: Tensor
    positions: Tensor
    starts: Tensor
    ends: Tensor
    expected_rows: int


def order(args: FusedMoeArgs) -> Order:
    """Sort the slots by expert."""
    tokens, k = args.topk_ids.shape
    experts, device = args.w1.shape[0], args.x.device
    shapes = (tokens * k,), (tokens, k), (experts,), (experts,)
    outs = tuple(scratch(shape, torch.int32, device) for shape in shapes)
    aligned = MoeAlignArgs(args.topk_ids, args.expert_map, experts)
    bucket = align_op.FORWARD.bucket(*aligned)
    moe_align.launch(outs, aligned, moe_align.configure(bucket, args.topk_ids.dtype))
    return Order(*outs, -(-tokens * k // experts))


def gather(args: FusedMoeArgs, rows: Order) -> Tensor:
    """(T * k, H): rows of tokens in this order."""
    gathered = scratch((rows.slots.shape[0], args.x.shape[1]), args.x.dtype, args.x.device)
    permuted = MoePermuteArgs(args.x, rows.slots, rows.positions)
    bucket = permute_op.FORWARD.bucket(*permuted)
    moe_permute.launch((gathered,), permuted, moe_permute.configure(bucket, args.x.dtype))
    return gathered


def combine(out: Tensor, y: Tensor, args: FusedMoeArgs, rows: Order) -> None:
    """out[t] = the weighted sum of the rows of token t in y (T * k, H)."""
    unpermuted = MoeUnpermuteArgs(y, args.topk_weights, rows.slots, rows.positions)
    bucket = unpermute_op.FORWARD.bucket(*unpermuted)
    moe_unpermute.launch((out,), unpermuted, moe_unpermute.configure(bucket, args.x.dtype))
