"""Launches of the two kernels of attention over a KV cache, for sequences of all, few or many query rows."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.hardware import device_info
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.attention.kernels.triton import tiles as tiling
from tilewright.ops.attention.kernels.triton.paged import tasks
from tilewright.ops.attention.kernels.triton.paged.attend import attend_kernel
from tilewright.ops.attention.kernels.triton.paged.combine import combine_kernel
from tilewright.ops.attention.paged.args import AS_QUERIES, TOKEN_SCALES, PagedArgs, cache_kind
from tilewright.ops.dependent import has_dependents
from tilewright.ops.quant.kernels.triton.numbers import as_stored

MOST_SEQUENCES = 4096  # each program holds one number for each
_WAVES = 4  # times that tasks fill the GPU, so that the last ones end together
_LEAST = 8  # key tiles of a task: below, its beginning and its end cost more than the balance gains
_FIXED_CHUNKS = 32  # of a sequence, where only its own length may decide
_CPU_PROCESSORS = 2  # in the interpreter, whose programs run one after another

_attend, _combine = TritonKernel(attend_kernel), TritonKernel(combine_kernel)
_combine_dependent = TritonKernel(combine_kernel, launch_pdl=True)


class Tile(NamedTuple):
    """block_m query rows and block_n keys.   ctas_per_sm: programs that fill a multiprocessor, so that one has loads in
    flight while the other computes; tasks are so long that they fill the GPU.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 2


class Form(NamedTuple):
    """Which sequences a launch serves: ALL, or those of FEW rows, at most few_rows, or of MANY.

    row_tiles: a bound of their number, from shapes.   rows: of a row tile that can be in use.
    """

    sequences: int
    few_rows: int
    row_tiles: int
    rows: int


def why_not_widths(q: Tensor, d: int, d_v: int) -> str | None:
    """Why the kernels cannot run over heads of d and d_v numbers, or None."""
    if max(d, d_v) > tiling.MOST_D:
        return f"holds heads of up to {tiling.MOST_D} numbers"
    if q.dtype == torch.float32 and target_of(q).startswith("gfx") and width(d, d_v) > 128:
        return "holds float32 heads of up to 128 numbers on AMD's GPUs, whose registers spill beyond"
    return None


def why_not(args: PagedArgs) -> str | None:
    """Why the kernels cannot run, or None."""
    reason = why_not_widths(args.q, args.q.shape[2], args.v_cache.shape[3])
    if reason is not None:
        return reason
    return f"takes at most {MOST_SEQUENCES} sequences" if args.lengths.shape[0] > MOST_SEQUENCES else None


def width(d: int, d_v: int) -> int:
    """Columns of all tiles: one number for keys and values, because two products of different widths that read shared
    memory without descriptors get wrong addresses on Hopper (`tiles.streamed_parts`).
    """
    return max(16, tiling.next_power_of_2(max(d, d_v)))


def _columns(args: PagedArgs) -> int:
    return width(args.q.shape[2], args.v_cache.shape[3])


def stages(depth: int, has_pages: bool) -> int:
    """`num_stages` with which Triton keeps depth - 1 tiles of keys and of values in shared memory.

    Numbers of pages are loaded before their rows, and it divides the stages among both: with pages 3 and 4 stages
    have the one tile of 2 without, 5 the two of 3 (read from shared memory of compiled kernels).
    """
    return 2 * depth - 1 if has_pages else depth


def fitted(tile: Tile, args: PagedArgs) -> Tile:
    """`tile`, chosen for an H200, reduced to what the GPU of the call can run."""
    arch, columns = target_of(args.q), _columns(args)
    cache = cache_kind(args.k_cache, args.k_scale, args.v_scale)
    shared = tiling.SHARED_BYTES["sm_90"] if arch == "cpu" else tiling.SHARED_BYTES.get(arch, tiling.SHARED_ELSEWHERE)
    if args.q.dtype == torch.float32:  # multiplied by FMAs, whose operands are in registers: larger tiles spill
        few_warps = columns <= 128 and cache == AS_QUERIES
        tile = tile._replace(block_m=16, block_n=16, num_warps=4 if few_warps else 8, num_stages=1)
    elif arch.startswith("sm_8"):  # products of registers
        block_n = 32 if columns <= 128 else 16
        tile = tile._replace(block_m=min(tile.block_m, 32), block_n=min(tile.block_n, block_n), num_warps=8)
    elif arch not in ("cpu", "sm_90"):
        tile = tile._replace(block_m=min(tile.block_m, 64), block_n=min(tile.block_n, 32))
    elif tile.block_m >= 64:
        # WGMMA's: with more keys than columns ptxas addresses the first product from a register that nothing wrote
        tile = tile._replace(block_n=min(tile.block_n, columns))
        if cache == TOKEN_SCALES:
            tile = tile._replace(block_n=min(tile.block_n, 32))
    if arch.startswith("gfx"):  # from 32 keys on, comparisons of a score's mask spill scalar registers (`tiles.fitted`)
        warps, stage_count = (8, 2) if args.q.dtype == torch.float32 else (4, min(tile.num_stages, 2))
        rows = 16 if tile.num_stages == 1 else tile.block_m
        tile = tile._replace(block_m=rows, block_n=16, num_warps=warps, num_stages=stage_count)
    size = max(args.q.element_size(), 2)  # of what is multiplied; e4m3 is widened in registers, on its way there
    has_pages = args.block_table is not None
    depth = (tile.num_stages + 1) // 2 if has_pages else tile.num_stages
    while depth > 1 and size * columns * (tile.block_m + 2 * depth * tile.block_n) > shared:
        depth -= 1
        tile = tile._replace(num_stages=stages(depth, has_pages))
    return tile


def launch(outs: tuple[Tensor, Tensor], args: PagedArgs, tile: Tile, form: Form, q_scale: Tensor | None = None) -> None:
    """Attend, and combine what was split.   q_scale: (B, H) of e4m3 queries; then scales of keys are (B, H_kv)."""
    (o, lse), k, v = outs, as_stored(args.k_cache), as_stored(args.v_cache)
    q = args.q if q_scale is None else as_stored(args.q)
    (count, heads, d), (_, page_size, kv_heads, d_v), batch = q.shape, v.shape, args.lengths.shape[0]
    group, few = heads // kv_heads, form.sequences != tasks.MANY.value
    each = count // batch if args.cu_seqlens is None else 0
    capacity = args.capacity if k.shape[0] else 0
    left = min(args.left, capacity)

    # Tasks: enough to fill the GPU, and the most that there are; both from shapes alone
    filling = max(1, processors(q) * tile.ctas_per_sm // kv_heads)
    fixed = args.batch_invariant
    most = (_FIXED_CHUNKS if few else 1) if fixed else _WAVES * filling
    splits = form.row_tiles * most if fixed else 2 * most
    split_tiles = min(form.row_tiles, most) if not fixed else form.row_tiles if few else 0
    partial_rows = splits * kv_heads * form.rows if split_tiles else 0
    partial_acc = scratch((max(partial_rows, 1), d_v), torch.float32, q.device)
    partial_stat = scratch((max(partial_rows, 1), 2), torch.float32, q.device)

    dependent = has_dependents(q)
    columns, block_b = _columns(args), max(16, triton.next_power_of_2(batch + (not each)))
    sizes = (batch, count, kv_heads, capacity)
    goal = (left, filling, most)
    division = (form.sequences, form.few_rows, fixed, _LEAST)
    blocks = (block_b, tile.block_m, tile.block_n)
    operands = (
        q, o, lse, partial_acc, partial_stat, k, v, args.lengths, args.block_table, args.cu_seqlens, args.sinks,
        q_scale, args.k_scale, args.v_scale, *sizes, page_size, *goal, args.scale, args.softcap,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        0 if args.block_table is None else args.block_table.stride(0),
        *((None, None) if q_scale is None else q_scale.stride()),
        *_scale_steps(args.k_scale), *_scale_steps(args.v_scale),
    )  # fmt: skip
    constants = (
        each, group, d, d_v, columns, args.causal and each != 1, left >= 0, args.softcap > 0.0,
        cache_kind(args.k_cache, args.k_scale, args.v_scale) == TOKEN_SCALES,
        _page(args), page_size % tile.block_n == 0, dependent, *division, form.rows, *blocks,
    )  # fmt: skip
    programs = kv_heads * (form.row_tiles * most if fixed else form.row_tiles + most)
    _attend((programs,), operands, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
    if not split_tiles:
        return
    rows_each, chunks = (1, 16) if few else (16, 1)
    combine = _combine_dependent if dependent else _combine
    combine(
        (kv_heads * split_tiles, -(-form.rows // rows_each)),
        (partial_acc, partial_stat, o, lse, args.lengths, args.cu_seqlens, args.sinks, *sizes, *goal),
        (each, group, d_v, columns, left >= 0, dependent, *division, form.rows, rows_each, chunks, *blocks),
        num_warps=4 if few else 8,
    )


def processors(q: Tensor) -> int:
    """Multiprocessors of the device of q."""
    return _CPU_PROCESSORS if target_of(q) == "cpu" else device_info(q.device).sm_count or 132


def _page(args: PagedArgs) -> int:
    """The page size where it is a constant of the kernel: powers of two, which divide by a shift."""
    page_size = args.k_cache.shape[1]
    return page_size if args.block_table is not None and page_size & (page_size - 1) == 0 else 0


def _scale_steps(scale: Tensor | None) -> tuple[Any, ...]:
    """Strides of pages, slots and heads; one scale of a head serves all tokens, of one sequence or of all."""
    if scale is None:
        return None, None, None
    return scale.stride() if scale.dim() == 3 else (scale.stride(0) if scale.dim() == 2 else 0, 0, scale.stride(-1))
