"""Hadamard transform in Triton: rows in registers, products with matrices of 16 to 64 on tensor cores.

H of n = a * b * c is P_a (x) S_b (x) S_c: a row seen as (a, b, c) is multiplied by a small matrix along each dimension.
A row that has no room in registers, or b * c = 128, is (a, 2, b, c): the sum of its halves is transformed, then their
difference, for which the halves are read again.
Every product takes its dimension last; what is shorter than 16, or no power of two (a = 12, 20, 28, 36), is padded with
zeros.  Entries of the matrices are computed from their indices, not read.
A product's operands are 16 bits wide, and 1 and -1 are exact in them.  So is x in bf16 and fp16; float32 numbers are
sums of bfloat16 numbers: three hold all 24 bits, and two, 16 bits, are enough between products whose result is bf16.
Infinities stay in the first summand, as they do in sums.
Backward: the same transform of dy.

Traffic: 4*M*N bytes at bf16, so 8192x4096 cannot beat 32 us at 4.2 TB/s.
Source: Agarwal et al., "HadaCore: Tensor Core Accelerated Hadamard Transform Kernel", 2024.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.hadamard import SQUARES, factor
from tilewright.ops.quant.hadamard_transform import BACKWARD, FORWARD, HadamardArgs, HadamardBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows, no_float64

_SHORTEST, _LONGEST = 16, 64  # of a product's dimension: a matrix of 128 leaves mma.sync no registers
_MOST = 16384  # elements of a tile: twice as many spill, 128 registers at 16 warps
_MASKS = {m: (q, sum(1 << s for s in squares)) for m, (q, squares) in SQUARES.items()}


class Config(NamedTuple):
    """elements: of a tile, padding included."""

    elements: int
    num_warps: int


class Shape(NamedTuple):
    """A row as (a, b, c): powers of two, and for a also the orders of Paley's matrices."""

    a: int
    b: int
    c: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.a * self.b * self.c

    @property
    def padded(self) -> "Shape":
        """Dimensions of a tile."""
        return Shape(*(d if d == 1 else max(_SHORTEST, triton.next_power_of_2(d)) for d in self))


def _shape(m: int, power: int) -> Shape:
    if power <= _LONGEST:
        return Shape(m, 1, power)
    if power > _LONGEST**2:
        m, power = _SHORTEST, power // _SHORTEST  # Sylvester's matrix again
    half = (power.bit_length() - 1) // 2
    return Shape(m, 1 << half, power >> half)


def shape_of(n: int) -> tuple[Shape, int]:
    """Returns (shape, halves): a row is one such shape, or two."""
    m = factor(n) or 1
    power = n // m
    shape = _shape(m, power)
    divided = power == 2 * _LONGEST or shape.padded.size > _MOST
    return (_shape(m, power // 2), 2) if divided else (shape, 1)


def _elements(n: int, rows_of_product: int) -> int:
    """Elements of a tile of at least one row, and of so many rows of every product."""
    padded = shape_of(n)[0].padded
    return max(padded.size, rows_of_product * max(padded))


def _warps(elements: int) -> int:
    return max(4, min(16, elements // 1024))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    elements = max(4096, _elements(bucket.N, 64))  # 64 rows: WGMMA
    if bucket.M >= 512 and shape_of(bucket.N)[0].padded.size == 4096:
        elements = 8192  # two rows: 53.2 -> 47.8 us at 8192x4096, H200, 2026-11
    return Config(elements, _warps(elements))


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    least = _elements(bucket.N, 16)
    return tuple(
        Config(elements, warps)
        for elements in (2048, 4096, 8192, _MOST)
        for warps in (4, 8, 16)
        if least <= elements <= max(4096, 4 * least) and 16 <= elements // (32 * warps) <= 64
    )


CONFIGS = tuple(Config(elements, _warps(elements)) for elements in (4096, 8192, _MOST))


@triton.jit
def _matrix(P: tl.constexpr, Q: tl.constexpr, SQUARES: tl.constexpr):  # float32 (P, P)
    """Sylvester's matrix, or with the field of Q elements Paley's, whose padding is arbitrary."""
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    if Q == 0:
        both = i & j
        both ^= both >> 4
        both ^= both >> 2
        negative = (both ^ (both >> 1)) & 1
    else:
        u, v = i >> 1, j >> 1
        if Q == 9:
            difference = ((u + 2) // 3 - (v + 2) // 3 + 12) % 3 * 3 + (u - v + 36) % 3
        else:
            difference = (u - v + 8 * Q) % Q
        square = tl.where((u == 0) | (v == 0), 1, (SQUARES >> difference) & 1)
        negative = tl.where(u == v, (i | j) & 1, (1 - square) ^ (i & j & 1))
    return 1.0 - 2.0 * negative.to(tl.float32)


@triton.jit
def _split(x):
    """(head, tail) of float32 x: head in the upper 16 bits, and what is left; an infinity or a NaN is all head."""
    is_finite = tl.abs(x) < float("inf")
    head = tl.where(is_finite, (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True), x)
    return head.to(tl.bfloat16), tl.where(is_finite, x - head, 0.0)


@triton.jit
def _product(x, P: tl.constexpr, Q: tl.constexpr, SQUARES: tl.constexpr, TERMS: tl.constexpr):
    """x (rows, P) times the matrix, float32; TERMS: summands of 16 bits of a float32 x, the smallest added first."""
    matrix = _matrix(P, Q, SQUARES)
    if x.dtype == tl.float32:
        matrix = matrix.to(tl.bfloat16)
        head, tail = _split(x)
        if TERMS == 3:
            middle, tail = _split(tail)
            y = tl.dot(middle, matrix, tl.dot(tail.to(tl.bfloat16), matrix))
        else:
            y = tl.dot(tail.to(tl.bfloat16), matrix)
        y = tl.dot(head, matrix, y)
    else:
        y = tl.dot(x, matrix.to(x.dtype))
    return y


@triton.jit
def _swapped(y, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """y (ROWS, D0, D1) as (ROWS, D1, D0), in two dimensions: the last one, and all before it."""
    return tl.reshape(tl.permute(tl.reshape(y, (ROWS, D0, D1)), (0, 2, 1)), (ROWS * D1, D0))


@triton.jit
def _hadamard_kernel(
    y, x, scale, M, stride_x,  # y, x: (M, a * HALVES * b * c)
    a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    Q: tl.constexpr, SQUARES: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of ROWS rows.  A, B, C: a, b, c padded."""
    offs_l = tl.arange(0, ROWS * A * B)  # lines of c elements
    row = tl.program_id(0).to(tl.int64) * ROWS + offs_l // (A * B)
    offs_a, offs_b, offs_c = offs_l // B % A, offs_l % B, tl.arange(0, C)
    mask = ((row < M) & (offs_a < a) & (offs_b < b))[:, None] & (offs_c < c)[None, :]
    offs_n = ((offs_a * HALVES * b + offs_b) * c)[:, None] + offs_c[None, :]
    x += row[:, None] * stride_x + offs_n
    y += row[:, None] * (a * HALVES * b * c) + offs_n
    TERMS: tl.constexpr = 2 if x.dtype.element_ty == tl.bfloat16 else 3
    for half in tl.range(HALVES, num_stages=1):
        tile = tl.load(x, mask=mask, other=0.0)  # (ROWS * A * B, C)
        if HALVES == 2:
            tile = tile.to(tl.float32) + (1 - 2 * half) * tl.load(x + b * c, mask=mask, other=0.0).to(tl.float32)
        # Multiply along c, b and a
        if C > 1:
            tile = _product(tile, C, 0, 0, TERMS)
        if B > 1:
            tile = _product(_swapped(tile, ROWS * A, B, C), B, 0, 0, TERMS)
            tile = _swapped(tile, ROWS * A, C, B)
        if A > 1:
            tile = _product(_swapped(tile, ROWS, A, B * C), A, Q, SQUARES, TERMS)
            tile = tl.reshape(_swapped(tile, ROWS, B * C, A), (ROWS * A * B, C))
        tl.store(y + half * (b * c), (tile.to(tl.float32) * scale).to(y.dtype.element_ty), mask=mask)


_kernel = TritonKernel(_hadamard_kernel)


def _launch(y: Tensor, x: Tensor, scale: float, config: Config) -> None:
    x = as_rows(x)
    m, n = x.shape
    shape, halves = shape_of(n)
    padded = shape.padded
    q, squares = _MASKS.get(shape.a, (0, 0))
    rows = max(1, config.elements // padded.size)
    parameters = (y, x, scale, m, x.stride(0))
    _kernel(
        (triton.cdiv(m, rows),), parameters, (*shape, *padded, q, squares, halves, rows), num_warps=config.num_warps
    )


TUNING = {
    "configure": configure,
    "config_type": Config,
    "configs": CONFIGS,
    "candidates": candidates,
}


@register_kernel(FORWARD, **TUNING, why_not=lambda args: no_float64(args.x))
def launch(outs: tuple[Tensor], args: HadamardArgs, config: Config) -> None:
    _launch(outs[0], args.x, args.scale, config)


@register_kernel(BACKWARD, **TUNING, why_not=lambda args: no_float64(args.dy))
def launch_backward(outs: tuple[Tensor], args: HadamardBackwardArgs, config: Config) -> None:
    _launch(outs[0], args.dy, args.scale, config)
