"""The program of packed sequences on a GPU, from cu_seqlens, in one launch or two.

The torch form in `packed` takes some fifteen launches, which cost more than the attention of a few short sequences.
One program here serves BLOCK queries: it finds the document of each by binary search, clamps the document's keys to
the band, and counts the queries so far that see a key.  Where there are several programs, a second launch adds the
counts of the programs before.  It writes 12 bytes a query.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.mask.program import HEADER_OF_SEQUENCES

BLOCK = 1024  # queries of a program


@triton.jit(do_not_specialize=["boundaries", "steps", "S_q", "S_k", "low", "high"])
def _packed_kernel(
    data, totals, cu_q, cu_k,  # data: the program, cu_q and cu_k: (boundaries,)
    boundaries, steps, S_q, S_k, low, high,
    HEADER: tl.constexpr, SAME: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    queries = pid * BLOCK + tl.arange(0, BLOCK)
    inside = queries < S_q
    if pid == 0:
        tl.store(data, S_q)
        tl.store(data + 1, S_k - S_q)
        tl.store(data + 2, HEADER)
    # Boundaries at a query or before it: the number of the query's document, 0 or `boundaries` for none
    number, end_of_search = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + boundaries
    for _ in range(steps):
        open_range = number < end_of_search
        middle = (number + end_of_search) // 2
        passed = tl.load(cu_q + middle, mask=open_range, other=0).to(tl.int32) <= queries
        end_of_search = tl.where(open_range & ~passed, middle, end_of_search)
        number = tl.where(open_range & passed, middle + 1, number)
    last = boundaries - 1
    begin = tl.load(cu_k + tl.maximum(number - 1, 0)).to(tl.int32)
    end = tl.load(cu_k + tl.minimum(number, last)).to(tl.int32)
    position = queries
    if not SAME:
        position += end - tl.load(cu_q + tl.minimum(number, last)).to(tl.int32)
    # Keys of the document in the band around the position
    first, stop = begin, end
    if HAS_HIGH:
        first = tl.minimum(tl.maximum(position - high, begin), end)
    if HAS_LOW:
        stop = tl.minimum(tl.maximum(position - low + 1, begin), end)
    sees = (inside & (first < stop)).to(tl.int32)
    row = data + HEADER + queries
    tl.store(row, first, mask=inside)
    tl.store(row + S_q, stop, mask=inside)
    tl.store(row + 2 * S_q, tl.cumsum(sees, 0), mask=inside)
    tl.store(totals + pid, tl.sum(sees, 0))


@triton.jit(do_not_specialize=["S_q"])
def _carry_kernel(data, totals, S_q, HEADER: tl.constexpr, BLOCK: tl.constexpr):
    """Add to the counts of a program's queries those of all programs before it."""
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    before = 0
    for start in range(0, pid, BLOCK):
        before += tl.sum(tl.load(totals + start + offs, mask=start + offs < pid, other=0), 0)
    queries = pid * BLOCK + offs
    counts = data + HEADER + 2 * S_q + queries
    inside = queries < S_q
    tl.store(counts, tl.load(counts, mask=inside, other=0) + before, mask=inside)


_packed, _carry = TritonKernel(_packed_kernel), TritonKernel(_carry_kernel)


def write(
    data: Tensor, cu_q: Tensor, cu_k: Tensor, lengths: tuple[int, int], band: tuple[int | None, int | None]
) -> None:
    """Write the program of packed sequences: int32 (3 + 3 * S_q,), for cu_q and cu_k (documents + 1,), contiguous.

    lengths: S_q and S_k.   band: low and high, None for no limit, small enough that no position minus them overflows.
    """
    (s_q, s_k), (low, high) = lengths, band
    programs = max(-(-s_q // BLOCK), 1)
    totals = scratch((programs,), data.dtype, data.device)
    boundaries = len(cu_q)
    _packed(
        (programs,),
        (data, totals, cu_q, cu_k, boundaries, boundaries.bit_length(), s_q, s_k, low or 0, high or 0),
        (HEADER_OF_SEQUENCES, cu_k is cu_q, low is not None, high is not None, BLOCK),
        num_warps=4,
    )
    if programs > 1:
        _carry((programs,), (data, totals, s_q), (HEADER_OF_SEQUENCES, BLOCK), num_warps=4)
