"""Grids of Triton kernels over the tiles of many rows, without a division before the first load.

A program that divides its number by the tiles of a row waits some 100 cycles for that: 0.06 of the 1.3 us that a kernel
of a few rows takes.  So rows are a dimension of their own, and more than it may have are divided among planes.
"""

import triton
import triton.language as tl

_MOST = 65535  # programs that a grid may have in its second or third dimension


def grid_of(tiles: int, rows: int) -> tuple[int, int, int]:
    """`tiles` of each of `rows`; the last plane may have rows that do not exist."""
    planes = max(1, triton.cdiv(rows, _MOST))
    return tiles, triton.cdiv(rows, planes), planes


@triton.jit
def row_of_grid() -> tl.tensor:
    """The row of this program, in int64; the tile is `program_id(0)`."""
    return tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)
