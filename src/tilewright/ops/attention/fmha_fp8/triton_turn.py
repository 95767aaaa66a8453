"""Values turned so that keys lie side by side: (B, H_kv, S, D_v) becomes (B, H_kv, D_v, S padded to 16 bytes).

Hopper's float8 products read the second operand along K alone, and in a product with V that is the sequence.  Turned
once for all tiles of queries: 2 * B * H_kv * S * D_v bytes, (2, 16, 8192, 128) cannot beat 16 us at 4.2 TB/s.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel

BLOCK = 128
_VECTOR = 16


@triton.jit
def turn_kernel(
    turned, v, H, S, pitch, stride_b, stride_h, stride_s, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # turned: (B * H, D, pitch)   v: (B, H, S, D), both as bytes
    """turned[.., d, s] = v[.., s, d], zeros beyond S."""
    head = tl.program_id(0)
    b, h = head // H, head % H
    offs_s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    v += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    places = v + (offs_s.to(tl.int64)[:, None] * stride_s + columns[None, :])
    tile = tl.load(places, mask=(offs_s < S)[:, None] & (columns < D)[None, :], other=0)  # (BLOCK, WIDTH)
    out = turned + head.to(tl.int64) * D * pitch + columns.to(tl.int64)[:, None] * pitch + offs_s[None, :]
    tl.store(out, tile.T, mask=(columns < D)[:, None] & (offs_s < pitch)[None, :])


_kernel = TritonKernel(turn_kernel)


def turned(v: Tensor) -> Tensor:
    """v (B, H, S, D) of one-byte elements as (B, H, D, S), rows at multiples of 16 bytes; in memory of this call."""
    batch, heads, s, d = v.shape
    pitch = -(-s // _VECTOR) * _VECTOR
    made = scratch((batch, heads, d, pitch), v.dtype, v.device)
    grid = (batch * heads, -(-s // BLOCK))
    _kernel(
        grid,
        (made.view(torch.uint8), v.view(torch.uint8), heads, s, pitch, *v.stride()[:3]),
        (d, triton.next_power_of_2(d), BLOCK),
        num_warps=4,
        num_stages=1,
    )
    return made[..., :s]
