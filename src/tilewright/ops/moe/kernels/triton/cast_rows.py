"""Rows of tokens in the order of experts, cast to e4m3 with a scale for 128 neighbours: `moe_permute` of a cast.

A program reads a few groups of a token once, casts them and writes them k times.  Traffic: T*H read in 16 bits, and
1.03*T*k*H bytes written: 4096 tokens of 7168, k = 8, are 300 MB, 70 us at 4.2 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.kernels.triton.numbers import as_stored, encode, inverse, magnitude, scale_of
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.rows import as_rows

GROUPS = 8  # of 128 columns, in a program


@triton.jit
def _cast_rows_kernel(q, scales, x, positions, N, stride_x, pitch, K: tl.constexpr, GROUPS: tl.constexpr):
    """q: (T * K, N)   scales: (N / 128, pitch)   x: (T, N)   positions: (T, K)"""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs_n = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + token * stride_x + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude(values), 1), False)
    stored = encode(values * inverse(scale)[:, None], q)
    for j in tl.static_range(K):
        row = tl.load(positions + token * K + j).to(tl.int64)
        tl.store(q + row * N + offs_n, stored, mask=(offs_n < N) & (row >= 0))
        tl.store(scales + group.to(tl.int64) * pitch + row, scale, mask=(group * 128 < N) & (row >= 0))


_kernel = TritonKernel(_cast_rows_kernel)


def scale_memory(rows: int, depth: int, device: torch.device) -> Tensor:
    """Scratch memory of the scales of (rows, depth), (rows, ceil(depth / 128)) in the layout TOKEN."""
    blocks, (_, pitch) = TOKEN.shape(rows, depth)[1], TOKEN.strides(rows, depth)
    return scratch((blocks, pitch), torch.float32, device)[:, :rows].mT


def cast_rows(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(q (T * k, H), scales): row positions[t, j] is token t; rows of no slot are not written."""
    x = as_rows(x)
    (tokens, columns), k = x.shape, positions.shape[1]
    q = scratch((tokens * k, columns), torch.float8_e4m3fn, x.device)
    scales = scale_memory(tokens * k, columns, x.device)
    groups = min(GROUPS, triton.next_power_of_2(triton.cdiv(columns, 128)))
    _kernel(
        (tokens, triton.cdiv(columns, 128 * groups)),
        (as_stored(q), scales, x, positions, columns, x.stride(0), scales.stride(1)),
        (k, groups),
        num_warps=max(1, groups // 2),
    )
    return q, scales
