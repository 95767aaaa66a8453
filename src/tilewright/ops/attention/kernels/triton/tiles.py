"""Shared by the Triton kernels of attention on the host: tiles and how they fit, parts of a head, descriptors."""

from collections.abc import Sequence
from contextvars import copy_context
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.mask.tables import tile_table_of
from tilewright.ops.attention.arguments import MaskArgs
from tilewright.ops.attention.bucket import PACKED, PROGRAM, SLOPES, SOFTCAP
from tilewright.ops.attention.dropped import Dropout

MOST_D = 256
L2_BYTES = 24 << 20  # K and V of the heads that run together; half of the L2 of an H200
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
SHARED_ELSEWHERE = 99 << 10  # sm_86, sm_89, sm_120
_AMD_TERMS = 16
"""Rows of the streamed side: from 32 on MFMA tiles are 32 x 32, 16 scores per lane, and scalar registers spill."""


class Config(NamedTuple):
    """A forward's `Tile`, and whether to load through TMA descriptors where the GPU has them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool

    @property
    def tile(self) -> "Tile":
        return Tile(self.block_m, self.block_n, self.num_warps, self.num_stages)


class Tile(NamedTuple):
    """Tile of one kernel: block_m queries and block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Looping:
    """A kernel whose loop runs over queries or keys; its parameter `length` is their number.

    Triton specialises an integer argument of 1 to a constant and removes the loop.  Then two dots of different widths
    read the same shared memory, and ptxas (12.8 to 13.4) computes the addresses of the second one from a uniform
    register that it never writes, or that holds another number.  So a length of 1 is not specialised.
    """

    def __init__(self, fn: Any, length: str) -> None:
        self._usual, self._of_one = TritonKernel(fn), TritonKernel(triton.jit(fn.fn, do_not_specialize=[length]))

    def over(self, length: int) -> TritonKernel:
        """The kernel for a loop over `length` rows."""
        return self._of_one if length == 1 else self._usual


def has_terms(mask: int, extras: int) -> bool:
    """True if scores are softcapped, get an ALiBi slope or are masked by a program, by fields of a bucket."""
    return bool(extras & (SOFTCAP | SLOPES)) or mask in (PROGRAM, PACKED)


def next_power_of_2(n: int) -> int:
    """The least one that is not below `n`, at least 1.  On a host Triton's, which kernels may call too, takes 5 us."""
    return 1 << max(n - 1, 0).bit_length()


def parts(d: int) -> tuple[int, int]:
    """Powers of two, at least 16, whose sum is at least `d` and little more: (64, 16) for 80; (128, 0) for 128."""
    first = max(1 << (d.bit_length() - 1), 16)
    rest = max(0, d - first)
    second = max(16, next_power_of_2(rest)) if rest else 0
    return (2 * first, 0) if second == first else (first, second)


def part(d: int) -> int:
    """The power of two, at least 16, that covers `d`; 0 for 0."""
    return max(16, next_power_of_2(d)) if d else 0


def streamed_parts(d: int, t: Tensor, descriptors: bool) -> tuple[int, int]:
    """`parts` of a width whose rows are read in a loop, on the GPU of `t`.  A single part on Hopper, of 16 bits, where
    no descriptors copy them.

    There two dots of different widths read the same shared memory, and ptxas (12.8 to 13.4, every level) computes the
    addresses of the second one from a uniform register that it never writes.
    """
    one = not descriptors and t.element_size() == 2 and target_of(t) == "sm_90"
    return (part(d), 0) if one else parts(d)


def has_descriptors(t: Tensor) -> bool:
    """True if the GPU of `t` has TMA, which Triton's tensor descriptors use."""
    arch = target_of(t)
    return arch == "cpu" or (arch.startswith("sm_") and int(arch[3:]) >= 90)


def describable(t: Tensor) -> bool:
    """True if a descriptor can address `t` (B, H, S, D): its strides are positive multiples of 16 bytes."""
    vector = 16 // t.element_size()
    steps = [stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1]
    offset = t.storage_offset() if t.is_meta else t.data_ptr() // t.element_size()
    return offset % vector == 0 and all(step > 0 and step % vector == 0 for step in steps)


def steps(copied: bool, *tensors: Tensor | None) -> tuple[int | None, ...]:
    """Batch, head and row strides of each.  copied: through a descriptor, which needs legal strides for sizes of 1."""
    return tuple(step for t in tensors for step in _steps(copied, t))


def _steps(copied: bool, t: Tensor | None) -> Sequence[int | None]:
    if t is None:
        return None, None, None
    return _pitches(t) if copied else t.stride()[:3]


def _pitches(t: Tensor) -> tuple[int, int, int]:
    row = t.stride(2) if t.shape[2] > 1 else triton.cdiv(t.shape[3], 16) * 16
    head = t.stride(1) if t.shape[1] > 1 else row
    return (t.stride(0) if t.shape[0] > 1 else head), head, row


def dropped(dropout: Dropout | None) -> tuple[Any, ...]:
    """seed, offset, the largest random number that drops a probability, and the factor of the others; None without."""
    return (None,) * 4 if dropout is None else (dropout.seed, dropout.offset, dropout.last, dropout.scale)


def heads_together(k: Tensor, v: Tensor, group: int) -> int:
    """Query heads whose K and V fit in the L2 together, in whole groups of heads that share a kv head."""
    size = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return group * max(1, L2_BYTES // max(size, 1))


def fitted(
    tile: Tile,
    t: Tensor,
    resident: int,
    stage: int,
    widest: int,
    most: tuple[int, int],
    streamed: str = "block_n",
    terms: bool = False,
    scattered: bool = False,
) -> Tile:
    """`tile`, chosen for an H200, reduced to what the GPU of `t` can run.

    streamed: the side whose operands come in stages, with `stage` numbers per row; the other side has `resident`
    numbers per row in shared memory.  Only sm_90 multiplies from shared memory (wgmma).  Others multiply from
    registers: tiles of at most `most` rows, resident and streamed, and half of that where the `widest` operand of a
    head has more than 128 numbers.
    terms: scores are softcapped, get a slope, are masked by a program or dropped, and AMD's GPUs keep the comparisons
    of all scores in scalar registers.   scattered: rows are unaligned and each element is loaded into a separate
    register, for which four warps have no room, unless a head has at most 64 numbers.
    """
    arch, size = target_of(t), t.element_size()
    shared = SHARED_BYTES["sm_90"] if arch == "cpu" else SHARED_BYTES.get(arch, SHARED_ELSEWHERE)
    other = "block_m" if streamed == "block_n" else "block_n"
    if arch not in ("cpu", "sm_90"):
        rows = {side: n // (2 if widest > 128 else 1) for side, n in zip((other, streamed), most, strict=True)}
        if terms and arch.startswith("gfx"):
            rows[streamed] = min(rows[streamed], _AMD_TERMS)
        tile = tile._replace(**{side: min(getattr(tile, side), n) for side, n in rows.items()})
        if arch.startswith("gfx"):
            tile = tile._replace(num_warps=4, num_stages=min(tile.num_stages, 2))
        elif size == 2 and tile.block_m * tile.block_n <= 2048 and not (scattered and widest > 64):
            tile = tile._replace(num_warps=4)
    while (
        tile.num_stages > 1
        and size * (getattr(tile, other) * resident + tile.num_stages * getattr(tile, streamed) * stage) > shared
    ):
        tile = tile._replace(num_stages=tile.num_stages - 1)
    return tile


class Table(NamedTuple):
    """A tile table as kernels take it; None and 0 if the mask is a band."""

    counts: Tensor | None
    indices: Tensor | None
    strides: tuple[int, int, int]


def table(mask: MaskArgs, q: Tensor, k: Tensor, tile: Any, axis: Literal["query", "key"]) -> Table:
    """The tile table of a program, by query or by key; empty for a band.   tile: with block_m and block_n."""
    program, mask_data = mask.program, mask.mask_data
    if mask_data is None:
        return Table(None, None, (0, 0, 0))
    batch, heads, s_q, _ = q.shape
    counts, indices = tile_table_of(program, mask_data, batch, heads, s_q, k.shape[2], tile.block_m, tile.block_n, axis)
    by_batch, by_head, tiles, _ = counts.shape
    strides = (by_head * tiles if by_batch > 1 else 0, tiles if by_head > 1 else 0, indices.shape[3])
    return Table(counts, indices.contiguous(), strides)


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors of a launch, for `triton.set_allocator`."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launch(kernel: Any, grid: tuple[int, ...], args: Any, constants: Any, config: Any) -> None:
    """Launch with an allocator for Triton's descriptors, which does not replace the caller's allocator."""
    context = copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(kernel, grid, args, constants, num_warps=config.num_warps, num_stages=config.num_stages)
