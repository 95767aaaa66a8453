"""Rows that begin, or end, between two 16-byte boundaries: a head, a body of whole vectors, and a tail.

Rows of odd length begin at any element, and a compiler that cannot tell where reads and writes them element by element.
Here a row is divided at its own 16-byte boundaries.  The body begins at one and is whole vectors: a block of it is
loaded and stored 16 bytes at a time, and its mask ends between two vectors.  Head and tail, each shorter than a vector,
are one small tile of their own.  Nothing outside the row is read or written.

Tensors share the division if their rows begin equally far from a boundary; `unaligned` says whether they do.

Lengths and strides of whole vectors, such as 1368 elements of 16 bits, need no division: a kernel that takes them in
units of a vector, see `unit_of`, shows the compiler that they are multiples of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.collect import collecting

BYTES = 16  # of the longest load of a thread
SHORT = 512  # bytes of a row that give each lane of one warp a vector


def odd_length(n: int, dtype: torch.dtype) -> bool:
    """Are contiguous rows of `n` elements unaligned for the compiler, and long enough for this form?

    Triton knows of an integer whether it is a multiple of 16.
    """
    return n % 16 != 0 and n * dtype.itemsize >= SHORT


def unaligned(*rows: Tensor) -> bool:
    """Does this form suit `rows`, each (M, N) with unit stride in a row?

    All begin at a 16-byte boundary, and each of their rows equally far from one.
    """
    m, n = rows[0].shape
    size = rows[0].itemsize
    if not odd_length(n, rows[0].dtype) or any(t.itemsize != size or _start(t) % BYTES for t in rows):
        return False
    return m == 1 or not any((t.stride(0) - rows[0].stride(0)) * size % BYTES for t in rows)


def unit_of(itemsize: int, *sizes: int) -> int:
    """Elements that a kernel counts its sizes and strides in: a vector, where that tells the compiler more, else 1."""
    vector = BYTES // itemsize
    if all(size % 16 == 0 for size in sizes) or any(size % vector or size >= 1 << 31 for size in sizes):
        return 1  # UNIT times a number of units has 32 bits
    return vector


def _start(t: Tensor) -> int:
    """Address of the first element; a tensor without one counts as part of aligned memory."""
    return int(t.storage_offset()) * t.itemsize if collecting() is not None or t.is_meta else t.data_ptr()


# A single row a program is one-dimensional: in two dimensions its edges would take the layout of its body, a vector in
# every thread.


@triton.jit
def rows_and_columns(ROWS: tl.constexpr, BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """This program's rows and columns: (ROWS, 1) and (1, BLOCK_N); a scalar and (BLOCK_N,) if ROWS is 1."""
    row_idx, offs = tl.program_id(0), tl.arange(0, BLOCK_N)
    if ROWS > 1:
        row_idx, offs = row_idx * ROWS + tl.arange(0, ROWS)[:, None], offs[None, :]
    return row_idx, offs


@triton.jit
def row_sum(values: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Sums of rows, (ROWS, 1) or a scalar."""
    return tl.sum(values, len(values.shape) - 1, keep_dims=ROWS > 1)


@triton.jit
def row_max(values: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Maxima of rows, (ROWS, 1) or a scalar."""
    return tl.max(values, len(values.shape) - 1, keep_dims=ROWS > 1)


@triton.jit
def body_of(row_start: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:  # VECTOR: elements in 16 bytes
    """Where the bodies of rows begin that begin at `row_start`: the next multiple of VECTOR."""
    return (row_start + (VECTOR - 1)) // VECTOR * VECTOR


@triton.jit
def lengths(row_start: tl.tensor, N: tl.tensor, VECTOR: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Lengths of head and body."""
    head = (body_of(row_start, VECTOR) - row_start).to(tl.int32)
    return head, (N - head) // VECTOR * VECTOR


@triton.jit
def edge_columns(head: tl.tensor, body: tl.tensor, N: tl.tensor, VECTOR: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Columns of head and tail, and which of them exist: (2 * VECTOR,), or as many for each of (ROWS, 1)."""
    index = tl.arange(0, 2 * VECTOR)
    if len(head.shape) == 2:
        index = index[None, :]
    columns = tl.where(index < VECTOR, index, index - VECTOR + head + body)
    return columns, tl.where(index < VECTOR, index < head, columns < N)
