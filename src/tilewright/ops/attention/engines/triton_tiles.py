"""What the Triton engines of attention share on the host: tiles and their fit, the parts of a head, descriptors."""

from collections.abc import Sequence
from contextvars import copy_context
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.mask.tables import tile_table_of
from tilewright.ops.attention.fmha.raw import PACKED, PROGRAM

MOST_D = 256
L2_BYTES = 24 << 20  # keys and values of the heads that are worked on together; half of what an H200 has
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
SHARED_ELSEWHERE = 99 << 10  # sm_86, sm_89, sm_120
_AMD_TERMS = 16  # rows of the streamed side: from 32 on products are 32 by 32, 16 scores a lane, and scalars spill


SOFTCAP, SLOPES = 1, 2  # bits of `extras` in a bucket


class Config(NamedTuple):
    """Of a forward: `Tile`, and whether to use the copy engine where there is one."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool


class Tile(NamedTuple):
    """One kernel's launch: block_m queries and block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Looping:
    """A kernel whose loop runs over the queries or keys that its parameter `length` counts.

    Triton makes a constant of an integer that is 1, and the loop is gone: then two products of other widths read the
    same shared memory, and ptxas (12.8 to 13.4) computes the addresses of the second one from a uniform register that
    it never writes, or that holds another number.  So a length of 1 stays a number, as one of 3 is.
    """

    def __init__(self, fn: Any, length: str) -> None:
        self._usual, self._of_one = TritonKernel(fn), TritonKernel(triton.jit(fn.fn, do_not_specialize=[length]))

    def over(self, length: int) -> TritonKernel:
        """The kernel for a loop over so many."""
        return self._of_one if length == 1 else self._usual


def has_terms(mask: int, extras: int) -> bool:
    """Are scores, by a bucket of `fmha/raw.py`, capped, given a slope or masked by a program?"""
    return bool(extras & (SOFTCAP | SLOPES)) or mask in (PROGRAM, PACKED)


def parts(d: int) -> tuple[int, int]:
    """Powers of two, at least 16, whose sum is at least `d` and little more: (64, 16) for 80; (128, 0) for 128."""
    first = max(1 << (d.bit_length() - 1), 16)
    rest = max(0, d - first)
    second = max(16, triton.next_power_of_2(rest)) if rest else 0
    return (2 * first, 0) if second == first else (first, second)


def part(d: int) -> int:
    """The one power of two, at least 16, that covers `d`; 0 for nothing."""
    return max(16, triton.next_power_of_2(d)) if d else 0


def value_parts(d_v: int, t: Tensor, descriptors: bool) -> tuple[int, int]:
    """`parts` of the values on the GPU of `t`; one part on Hopper where values do not come through descriptors.

    Two products of other widths then read the same shared memory, and ptxas (12.8 to 13.4, every level) computes the
    addresses of the second one from a uniform register that it never writes.
    """
    return parts(d_v) if descriptors or target_of(t) != "sm_90" else (part(d_v), 0)


def has_descriptors(t: Tensor) -> bool:
    """Has the GPU of `t` a copy engine that Triton's tensor descriptors describe tiles to?"""
    arch = target_of(t)
    return arch == "cpu" or (arch.startswith("sm_") and int(arch[3:]) >= 90)


def describable(t: Tensor) -> bool:
    """Can a descriptor address `t` (B, H, S, D)?  Steps of 16 bytes, and none of nothing."""
    vector = 16 // t.element_size()
    steps = [stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1]
    at = t.storage_offset() if t.is_meta else t.data_ptr() // t.element_size()
    return at % vector == 0 and all(step > 0 and step % vector == 0 for step in steps)


def steps(copied: bool, *tensors: Tensor | None) -> tuple[int | None, ...]:
    """Strides of batch, head and row of each; copied: by a descriptor, where a dimension of one element needs some."""
    return tuple(step for t in tensors for step in _steps(copied, t))


def _steps(copied: bool, t: Tensor | None) -> Sequence[int | None]:
    if t is None:
        return None, None, None
    return _pitches(t) if copied else t.stride()[:3]


def _pitches(t: Tensor) -> tuple[int, int, int]:
    row = t.stride(2) if t.shape[2] > 1 else triton.cdiv(t.shape[3], 16) * 16
    head = t.stride(1) if t.shape[1] > 1 else row
    return (t.stride(0) if t.shape[0] > 1 else head), head, row


def heads_together(k: Tensor, v: Tensor, group: int) -> int:
    """Query heads whose keys and values fit in L2 together: whole groups."""
    size = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return group * max(1, L2_BYTES // max(size, 1))


def fitted(
    tile: Tile,
    t: Tensor,
    kept: int,
    d: int,
    d_v: int,
    most: tuple[int, int],
    streamed: str = "block_n",
    d_pe: int = 0,
    terms: bool = False,
    scattered: bool = False,
) -> Tile:
    """`tile`, which an H200 was asked about, as the GPU of `t` can run it.

    streamed: the side whose operands, of d, d_pe and d_v, come in stages; the other side keeps `kept` numbers a row.
    Only sm_90 multiplies from shared memory in groups of four warps.  Others multiply from registers: tiles of at most
    `most` rows, kept and streamed, and half of that for heads of more than 128.
    terms: scores are capped, get a slope or are masked by a program: comparisons of all scores that AMD's GPUs keep in
    scalar registers.   scattered: rows begin anywhere, and elements are loaded into registers of their own, for which
    four warps have no room.
    """
    arch, size = target_of(t), t.element_size()
    shared = SHARED_BYTES["sm_90"] if arch == "cpu" else SHARED_BYTES.get(arch, SHARED_ELSEWHERE)
    other = "block_m" if streamed == "block_n" else "block_n"
    if arch not in ("cpu", "sm_90"):
        rows = {
            side: n // (2 if max(d + d_pe, d_v) > 128 else 1) for side, n in zip((other, streamed), most, strict=True)
        }
        if terms and arch.startswith("gfx"):
            rows[streamed] = min(rows[streamed], _AMD_TERMS)
        tile = tile._replace(**{side: min(getattr(tile, side), n) for side, n in rows.items()})
        if arch.startswith("gfx"):
            tile = tile._replace(num_warps=4, num_stages=min(tile.num_stages, 2))
        elif size == 2 and tile.block_m * tile.block_n <= 2048 and not scattered:
            tile = tile._replace(num_warps=4)
    row = sum(parts(d) + parts(d_v)) + part(d_pe)
    while (
        tile.num_stages > 1
        and size * (getattr(tile, other) * kept + tile.num_stages * getattr(tile, streamed) * row) > shared
    ):
        tile = tile._replace(num_stages=tile.num_stages - 1)
    return tile


class Table(NamedTuple):
    """A tile table as kernels take it; nothing where the mask is a band."""

    counts: Tensor | None
    indices: Tensor | None
    strides: tuple[int, int, int]


def table(
    program: str, mask_data: Tensor | None, q: Tensor, k: Tensor, tile: Tile, by: Literal["query", "key"]
) -> Table:
    """The tiles that `program` leaves, by query or by key; nothing where there is none."""
    if mask_data is None:
        return Table(None, None, (0, 0, 0))
    batch, heads, s_q, _ = q.shape
    counts, indices = tile_table_of(program, mask_data, batch, heads, s_q, k.shape[2], tile.block_m, tile.block_n, by)
    by_batch, by_head, tiles, _ = counts.shape
    strides = (by_head * tiles if by_batch > 1 else 0, tiles if by_head > 1 else 0, indices.shape[3])
    return Table(counts, indices.contiguous(), strides)


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """For `triton.set_allocator`: memory that a launch keeps its descriptors in."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launch(kernel: Any, grid: tuple[int, ...], args: Any, constants: Any, config: Any) -> None:
    """Triton keeps descriptors in memory that it asks an allocator for; the caller's own allocator stays in force."""
    context = copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(kernel, grid, args, constants, num_warps=config.num_warps, num_stages=config.num_stages)
