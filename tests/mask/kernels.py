"""A kernel that writes what `allowed` says of one tile."""

import torch
import triton
import triton.language as tl

from tilewright.jit.triton_launch import TritonKernel
from tilewright.mask.triton_program import allowed


@triton.jit
def _tile_kernel(out, data, S_q, S_k, PROGRAM: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr):
    h, b = tl.program_id(0), tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    if TRANSPOSED:
        i, j = offs[None, :], offs[:, None]
    else:
        i, j = offs[:, None], offs[None, :]
    found = allowed(PROGRAM, data, b, h, i + S_k - S_q, j)
    at = out + (b * tl.num_programs(0) + h) * S_q * S_k + i * S_k + j
    tl.store(at, found.to(tl.int8), mask=(i < S_q) & (j < S_k))


tile = TritonKernel(_tile_kernel)


def dense(mask, batch, heads, s_q, s_k, device, transposed):
    """bool (batch, heads, s_q, s_k), one program a head."""
    text, data = mask.program(device)
    out = torch.empty(batch, heads, s_q, s_k, dtype=torch.int8, device=device)
    tile((heads, batch), (out, data, s_q, s_k), (text, transposed, 16), num_warps=4)
    return out.bool()
