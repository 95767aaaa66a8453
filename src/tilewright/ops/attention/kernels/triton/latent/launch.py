"""Launches of the two kernels of latent attention over a KV cache."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.attention.kernels.triton import tiles as tiling
from tilewright.ops.attention.kernels.triton.latent.attend import attend_kernel
from tilewright.ops.attention.kernels.triton.latent.combine import combine_kernel
from tilewright.ops.attention.kernels.triton.paged.launch import (
    MOST_SEQUENCES,
    Tile,
    processors,
    stages,
)
from tilewright.ops.attention.layout import addressable
from tilewright.ops.attention.mla_decode.args import MlaDecodeArgs
from tilewright.ops.dependent import has_dependents
from tilewright.ops.kvcache.mla_layout import TOKEN_BYTES, VECTOR
from tilewright.ops.quant.kernels.triton.numbers import as_stored
from tilewright.ops.quant.numbers import E4M3

_MOST_WIDTH, _MOST_REST = 256, 128
_LEAST = 2  # key tiles of a share: 1 x 128 heads x 8192 tokens took 30 us with 2 to 3 and 35 with 5, on an H100
_FIXED_SPLITS, _FIXED_LEAST = 32, 8  # segments of a sequence that only its own length may cut, and their key tiles
_CHUNKS = 16  # segments that the second kernel reads at once

_attend, _combine = TritonKernel(attend_kernel), TritonKernel(combine_kernel)
_combine_dependent = TritonKernel(combine_kernel, launch_pdl=True)


class Widths(NamedTuple):
    """Columns of the parts of a tile, powers of two that cover D: one or two of `width`, the values among them, `rest`,
    which may be 0.
    """

    width: int
    two: bool
    rest: int

    @property
    def value(self) -> int:
        return 2 * self.width if self.two else self.width

    @property
    def all(self) -> int:
        return self.value + self.rest


def widths(d: int, d_v: int) -> Widths:
    """The parts for tokens of d numbers, of which d_v are the value."""
    value = max(16, tiling.next_power_of_2(d_v), 1 << (d.bit_length() - 1))
    two = value > _MOST_WIDTH
    return Widths(value // 2 if two else value, two, tiling.part(max(d - value, 0)))


def why_not(args: MlaDecodeArgs) -> str | None:
    """Why the kernels cannot run, or None."""
    parts = widths(args.q.shape[3], args.d_v)
    if parts.width > _MOST_WIDTH or parts.rest > _MOST_REST:
        return f"holds values of up to {2 * _MOST_WIDTH} numbers and {_MOST_REST} more of a key"
    if args.q.dtype == torch.float32 and parts.two and target_of(args.q) != "cpu":
        return f"holds float32 values of up to {_MOST_WIDTH} numbers, because registers spill beyond"
    if args.is_packed and not (addressable(args.q) and addressable(args.kv_cache)):
        return f"reads tokens of {TOKEN_BYTES} bytes, and their queries, at multiples of {VECTOR} bytes"
    sequences = args.q.shape[0] * (1 if args.indices is None else args.q.shape[1])
    return f"takes at most {MOST_SEQUENCES} sequences" if sequences > MOST_SEQUENCES else None


def fitted(tile: Tile, args: MlaDecodeArgs) -> Tile:
    """`tile`, chosen for an H200, reduced to what the GPU of the call can run."""
    arch, columns = target_of(args.q), widths(args.q.shape[3], args.d_v)
    shared = tiling.SHARED_BYTES["sm_90"] if arch == "cpu" else tiling.SHARED_BYTES.get(arch, tiling.SHARED_ELSEWHERE)
    if args.q.dtype == torch.float32:  # multiplied by FMAs, whose operands are in registers: larger tiles spill
        tile = tile._replace(block_m=16, block_n=16, num_warps=8, num_stages=1)
    elif arch not in ("cpu", "sm_90"):
        warps, most = (4 if columns.value <= 128 else 8), stages(2, _is_indirect(args))
        tile = tile._replace(block_m=min(tile.block_m, 32), block_n=min(tile.block_n, 32), num_warps=warps)
        tile = tile._replace(num_stages=min(tile.num_stages, most))
    elif min(columns.width, columns.rest or columns.width) < 64:
        # WGMMA's: with more keys than columns ptxas addresses a product from a register that nothing wrote
        tile = tile._replace(block_m=min(tile.block_m, 32))
    if arch.startswith("gfx"):  # from 32 keys on, comparisons of a score's mask spill scalar registers (`tiles.fitted`)
        most = 1 if args.is_packed and arch == "gfx950" else 2  # which spills with 2, and gfx942 with 1
        tile = tile._replace(block_m=16, block_n=16, num_warps=8, num_stages=min(tile.num_stages, most))
    size, is_indirect = args.q.element_size(), _is_indirect(args)
    depth = (tile.num_stages + 1) // 2 if is_indirect else tile.num_stages
    while depth > 1 and size * columns.all * (tile.block_m + depth * tile.block_n) > shared:
        depth -= 1
        tile = tile._replace(num_stages=stages(depth, is_indirect))
    return tile


def _is_indirect(args: MlaDecodeArgs) -> bool:
    return args.block_table is not None or args.indices is not None


def launch(outs: tuple[Tensor, Tensor], args: MlaDecodeArgs, tile: Tile) -> None:
    """Attend, and combine what was cut."""
    (o, lse), q, cache, tile = outs, args.q, args.kv_cache, fitted(tile, args)
    (batch, each, heads, d), (pages, page_size, _), d_v = q.shape, cache.shape, args.d_v
    is_sparse = args.indices is not None
    sequences, tokens = (batch * each, each) if is_sparse else (batch, 1)
    s_q = each // tokens
    rows = s_q * heads
    row_tiles = -(-rows // tile.block_m)

    # Parts: as many as fill the GPU, from shapes alone
    fixed = args.batch_invariant
    if fixed:
        parts = slots = sequences * _FIXED_SPLITS
        splits, least, split_sequences = _FIXED_SPLITS, _FIXED_LEAST, sequences
    else:
        parts = max(1, processors(q) * tile.ctas_per_sm // row_tiles)
        slots, splits, least = 2 * parts, 1, _LEAST
        split_sequences = min(sequences, parts - 1)
    partial_rows = slots * row_tiles * tile.block_m
    partial_acc = scratch((partial_rows, d_v), torch.float32, q.device)
    partial_stat = scratch((partial_rows, 2), torch.float32, q.device)

    dependent, columns = has_dependents(q), widths(d, d_v)
    capacity = args.capacity if pages else 0
    sizes = (sequences, tokens, capacity)
    division = (fixed, splits, least)
    blocks = (max(16, triton.next_power_of_2(sequences)), tile.block_m, tile.block_n)
    table, in_pages = args.block_table, _is_indirect(args)
    _attend(
        (row_tiles * parts,),
        (
            q, o, lse, partial_acc, partial_stat, cache, args.lengths, table, args.indices, args.sinks,
            *sizes, page_size, pages * page_size, row_tiles, parts, args.scale,
            *q.stride()[:3], *cache.stride()[:2], 0 if table is None else table.stride(0),
        ),
        (
            s_q, heads, d, d_v, *columns, args.causal and s_q > 1, args.is_packed, _converts(args),
            page_size if in_pages and page_size & (page_size - 1) == 0 else 0, page_size % tile.block_n == 0, dependent,
            *division, *blocks,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    if not split_sequences:
        return
    combine = _combine_dependent if dependent else _combine
    combine(
        (split_sequences, rows),
        (partial_acc, partial_stat, o, lse, args.lengths, args.sinks, *sizes, row_tiles, parts),
        (s_q, heads, d_v, columns.value, dependent, *division, _CHUNKS, *blocks),
        num_warps=4,
    )


def _converts(args: MlaDecodeArgs) -> bool:
    """Has the GPU e4m3, if tokens are packed?"""
    return args.is_packed and as_stored(args.kv_cache.view(E4M3)).dtype == E4M3
