"""Gradient of a key that all heads share: the sum of the gradients of each head, always in one order.

The backward has one program per key tile and head, which fills the GPU with few tokens too.  Each writes its gradient
in float32, and this kernel reads them once: 4 * B * H * S * D bytes, a hundredth of the backward's time.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel

_STEP, _BLOCK = 16, 256


@triton.jit
def head_sum_kernel(
    out, per_head, H, size, stride_b, stride_s, D: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):  # out: (B, 1, S, D) by stride   per_head: (B, H, S, D) fp32   size: S * D
    """out = sum of `per_head` over H; the loads of STEP heads are in flight together."""
    tiles = tl.cdiv(size, BLOCK)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    offs = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    in_range = offs < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, STEP):
        heads = start + tl.arange(0, STEP)
        ptrs = per_head + ((b * H + heads)[:, None] * size + offs[None, :])
        acc += tl.sum(tl.load(ptrs, mask=(heads < H)[:, None] & in_range[None, :], other=0.0), 0)
    out_ptrs = out + (b * stride_b + (offs // D).to(tl.int64) * stride_s + offs % D)
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=in_range)


_kernel = TritonKernel(head_sum_kernel)


def head_sum(out: Tensor, per_head: Tensor) -> None:
    """out (B, 1, S, D) with a unit last stride = per_head (B, H, S, D) float32, contiguous, summed over H in order."""
    batch, heads, s, d = per_head.shape
    size = s * d
    args = (out, per_head, heads, size, out.stride(0), out.stride(2))
    _kernel((batch * triton.cdiv(size, _BLOCK),), args, (d, _STEP, _BLOCK), num_warps=4)
