"""Layouts of scales: how many elements share one, its dtype, and its place in memory.

A quantised matrix is (rows, depth) with depth along K, as both operands of `x @ w.T` are.  Its scales are a matrix
too: one for each `rows` x `depth` block of elements, at the block's index.  The casts write the layouts below, and the
GEMM kernels of this library read them, so no scale tensor is transposed in between.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = 0
"""A block size: all rows, or all of K."""


def _blocks(size: int, block: int) -> int:
    return 1 if block == WHOLE else -(-size // block)


@dataclass(frozen=True)
class ScaleLayout:
    """One scale for each block of `rows` x `depth` elements; WHOLE means all of them.

    dtype       float32; or int32: four UE8M0 exponents, of four consecutive blocks along K, in one word, lowest first
    along_rows  scales of consecutive rows are adjacent in memory ("MN-major"), as the copy engine reads the scales of a
                tile's rows; else scales along K are
    alignment   the stride between lines of adjacent scales is a multiple of this many scales, 4 float32 are 16 bytes;
                the padding at the end of a line is never read
    """

    rows: int
    depth: int
    dtype: torch.dtype = torch.float32
    along_rows: bool = True
    alignment: int = 4

    def shape(self, rows: int, depth: int) -> tuple[int, int]:
        """Shape of the scales of a (rows, depth) matrix."""
        packed = 4 if self.dtype == torch.int32 else 1
        return _blocks(rows, self.rows), -(-_blocks(depth, self.depth) // packed)

    def strides(self, rows: int, depth: int) -> tuple[int, int]:
        """Strides of these scales, in elements."""
        lines = self.shape(rows, depth)
        pitch = -(-lines[0 if self.along_rows else 1] // self.alignment) * self.alignment
        return (1, pitch) if self.along_rows else (pitch, 1)

    def empty(self, rows: int, depth: int, device: torch.device | str, *batch: int) -> Tensor:
        """Uninitialised scales of a (*batch, rows, depth) tensor."""
        shape, strides = self.shape(rows, depth), self.strides(rows, depth)
        size = shape[1] * strides[1] if self.along_rows else shape[0] * strides[0]
        steps = []
        for count in reversed(batch):
            steps.append(size)
            size *= count
        return torch.empty_strided((*batch, *shape), (*reversed(steps), *strides), dtype=self.dtype, device=device)

    def mismatch(self, scales: Tensor, rows: int, depth: int) -> str | None:
        """Why kernels cannot read `scales` (..., *shape) as the scales of a (..., rows, depth) tensor, or None.

        The stride of a single element does not matter, and a pitch may exceed the least one.
        """
        shape, strides = self.shape(rows, depth), self.strides(rows, depth)
        if scales.dtype != self.dtype:
            return f"are {scales.dtype}; need {self.dtype}"
        if tuple(scales.shape[-2:]) != shape:
            return f"are {tuple(scales.shape[-2:])}; need {shape} for a matrix of {(rows, depth)}"
        unit, line = (-2, -1) if self.along_rows else (-1, -2)
        pitch = scales.stride(line)
        if shape[unit] > 1 and scales.stride(unit) != 1:
            return f"have strides {tuple(scales.stride()[-2:])}; need {strides}"
        if shape[line] > 1 and (pitch < shape[unit] or pitch % self.alignment):
            return f"have strides {tuple(scales.stride()[-2:])}; need {strides}"
        return None


TOKEN = ScaleLayout(1, 128)
"""128 elements of one row: activations, and both operands of a weight gradient."""
BLOCK = ScaleLayout(128, 128, along_rows=False, alignment=1)
"""128 x 128 elements: weights."""
ROW = ScaleLayout(1, WHOLE, alignment=1)
"""A whole row: a token, or an output channel of a weight."""
TENSOR = ScaleLayout(WHOLE, WHOLE, alignment=1)
"""The whole tensor."""
TOKEN_UE8M0 = ScaleLayout(1, 128, torch.int32)
"""TOKEN with powers of two as scales, packed: the layout of Blackwell's tensor cores."""
