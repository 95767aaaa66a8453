"""Transpose of V, keys contiguous: (B, H_kv, S, D_v) to (B, H_kv, D_v, S padded to 16 bytes).

Hopper's float8 wgmma reads its second operand K-major only, and K of P V is the sequence.  V is transposed once for all
query tiles: 2 * B * H_kv * S * D_v bytes, (2, 16, 8192, 128) cannot beat 16 us at 4.2 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel

BLOCK = 128
_VECTOR = 16


@triton.jit
def transpose_kernel(
    v_t, v, H, S, pitch, stride_b, stride_h, stride_s,
    D: tl.constexpr, WIDTH: tl.constexpr, FRAGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # v_t: (B * H, D, pitch)   v: (B, H, S, D), both as bytes  # fmt: skip
    """v_t[.., d, s] = v[.., s, d], zeros beyond S; with FRAGMENTS the keys of each group of 16 in another order."""
    head = tl.program_id(0)
    b, h = head // H, head % H
    offs_s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    keys = offs_s
    if FRAGMENTS:  # place 4 c + 2 h + e has key 8 h + 2 c + e
        place = offs_s % 16
        keys = offs_s - place + place % 4 // 2 * 8 + place // 4 * 2 + place % 2
    v += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    ptrs = v + (keys.to(tl.int64)[:, None] * stride_s + columns[None, :])
    tile = tl.load(ptrs, mask=(keys < S)[:, None] & (columns < D)[None, :], other=0)  # (BLOCK, WIDTH)
    out = v_t + head.to(tl.int64) * D * pitch + columns.to(tl.int64)[:, None] * pitch + offs_s[None, :]
    tl.store(out, tile.T, mask=(columns < D)[:, None] & (offs_s < pitch)[None, :])


_kernel = TritonKernel(transpose_kernel)


def transposed(v: Tensor, fragments: bool = False) -> Tensor:
    """Transposed copy (B, H, D, S) of v (B, H, S, D) of one-byte elements, rows at multiples of 16 bytes.

    fragments: (B, H, D, S rounded up to 16), the keys of each group of 16 in the order 0, 1, 8, 9, 2, 3, 10, 11, ...:
    that of the scores of a row which the four threads of a wgmma hold in turn.  Zeros stand where there is no key.
    The copy lives in scratch memory of this call.
    """
    batch, heads, s, d = v.shape
    pitch = -(-s // _VECTOR) * _VECTOR
    v_t = scratch((batch, heads, d, pitch), v.dtype, v.device)
    grid = (batch * heads, -(-s // BLOCK))
    _kernel(
        grid,
        (v_t.view(torch.uint8), v.view(torch.uint8), heads, s, pitch, *v.stride()[:3]),
        (d, triton.next_power_of_2(d), fragments, BLOCK),
        num_warps=4,
        num_stages=1,
    )
    return v_t if fragments else v_t[..., :s]
