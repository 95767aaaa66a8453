"""The steps of few tokens around the products of their experts, for Hopper: the launches of `few_tokens.cuh`."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.compilers.kernel_args import I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.ops.gemm.operands import FP8, copyable
from tilewright.ops.moe.fused.args import FusedMoeArgs
from tilewright.ops.moe.kernels.pipeline import Order, order_memory
from tilewright.ops.moe.kernels.triton.cast_rows import scale_memory
from tilewright.ops.rows import as_rows

MOST_SLOTS = 64
_COLUMNS, _THREADS = 1024, 128  # of a block, as in the header
_FILE = Path(__file__).with_name("few_tokens.cuh")
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)


class OrderParams(NamedTuple):
    """The compile-time constants of few_rows_in_order."""

    kCast: bool
    kSlots: int
    Element: torch.dtype
    Id: torch.dtype


class OrderArgs(NamedTuple):
    """The parameters of few_rows_in_order."""

    rows: Pointer
    scales: Pointer
    slots: Pointer
    positions: Pointer
    starts: Pointer
    ends: Pointer
    x: Pointer
    ids: Pointer
    expert_map: Pointer
    total: I32
    experts: I32
    map_length: I32
    top_k: I32
    columns: I32
    x_pitch: I64
    pitch: I32


class GateParams(NamedTuple):
    """The compile-time constants of few_gated_rows."""

    Element: torch.dtype


class GateArgs(NamedTuple):
    """The parameters of few_gated_rows."""

    q: Pointer
    scales: Pointer
    both: Pointer
    columns: I32
    pitch: I32


class SumParams(NamedTuple):
    """The compile-time constants of few_weighted_rows."""

    Element: torch.dtype
    Weight: torch.dtype


class SumArgs(NamedTuple):
    """The parameters of few_weighted_rows."""

    out: Pointer
    y: Pointer
    weights: Pointer
    positions: Pointer
    top_k: I32
    columns: I32


ORDER = CudaKernel(_FILE, "few_rows_in_order", OrderArgs, archs=("sm_90",), dependent=True)
GATE = CudaKernel(_FILE, "few_gated_rows", GateArgs, archs=("sm_90",), dependent=True)
SUM = CudaKernel(_FILE, "few_weighted_rows", SumArgs, archs=("sm_90",), dependent=True)


def serves(args: FusedMoeArgs, out: Tensor) -> bool:
    """Returns whether these are few slots, of rows that can be read and written in 16 bytes."""
    few = 0 < args.topk_ids.numel() <= MOST_SLOTS and args.topk_weights.dtype in _WEIGHTS
    return few and copyable(args.x) and args.x.stride(-1) == 1 and copyable(out)


def order_and_rows(args: FusedMoeArgs, expected_rows: int, *, cast: bool) -> tuple[Order, Tensor, Tensor | None]:
    """Sort the slots by expert; rows of tokens (T * k, H) in this order, cast to e4m3 with scales where asked."""
    x, ids = as_rows(args.x), args.topk_ids.contiguous()
    (tokens, columns), k, experts = x.shape, ids.shape[1], args.w1.shape[0]
    memory = order_memory(args)
    rows = scratch((tokens * k, columns), FP8 if cast else x.dtype, x.device)
    scales = scale_memory(tokens * k, columns, x.device) if cast else None
    expert_map = None if args.expert_map is None else args.expert_map.contiguous()
    ORDER(
        (-(-columns // _COLUMNS), tokens),
        OrderArgs(
            rows,
            scales,
            *memory,
            x=x,
            ids=ids,
            expert_map=expert_map,
            total=tokens * k,
            experts=experts,
            map_length=experts if expert_map is None else expert_map.shape[0],
            top_k=k,
            columns=columns,
            x_pitch=x.stride(0),
            pitch=0 if scales is None else scales.stride(1),
        ),
        OrderParams(cast, MOST_SLOTS, x.dtype, ids.dtype),
        block=_THREADS,
    )
    return Order(*memory, expected_rows), rows, scales


def gate_and_cast(both: Tensor) -> tuple[Tensor, Tensor]:
    """(q (S, I), scales) of silu(gate) * up, of both (S, 2 I)."""
    rows, columns = both.shape[0], both.shape[1] // 2
    q, scales = scratch((rows, columns), FP8, both.device), scale_memory(rows, columns, both.device)
    grid = -(-columns // _COLUMNS), rows
    GATE(grid, GateArgs(q, scales, both, columns, scales.stride(1)), GateParams(both.dtype), block=_THREADS)
    return q, scales


def combine(out: Tensor, y: Tensor, args: FusedMoeArgs, rows: Order) -> None:
    """out[t] = the weighted sum of the rows of token t in y (T * k, H)."""
    weights = args.topk_weights.contiguous()
    (tokens, columns), k = out.shape, weights.shape[1]
    SUM(
        (-(-columns // _COLUMNS), tokens),
        SumArgs(out, y, weights, rows.positions, k, columns),
        SumParams(out.dtype, weights.dtype),
        block=_THREADS,
    )
