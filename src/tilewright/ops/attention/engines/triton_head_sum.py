"""The gradient of a key that all heads share: the sum of what each head gives, in one order.

Every key tile of every head is a program of the backward, so that the processors are busy with few tokens too; each
leaves its share in float32, and this reads them once: 4 * B * H * S * D bytes, a hundredth of the backward's time.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel

_STEP, _BLOCK = 16, 256


@triton.jit
def head_sum_kernel(  # type: ignore[no-untyped-def]
    out, shares, H, size, stride_b, stride_s, D: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):  # out: (B, 1, S, D) by stride   shares: (B, H, S, D) fp32   size: S * D
    """out = sum of `shares` over H, STEP heads after STEP heads, whose loads are on their way together."""
    tiles = tl.cdiv(size, BLOCK)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    offs = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < size
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, STEP):
        heads = start + tl.arange(0, STEP)
        at = shares + ((b * H + heads)[:, None] * size + offs[None, :])
        total += tl.sum(tl.load(at, mask=(heads < H)[:, None] & inside[None, :], other=0.0), 0)
    places = out + (b * stride_b + (offs // D).to(tl.int64) * stride_s + offs % D)
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


_kernel = TritonKernel(head_sum_kernel)


def head_sum(out: Tensor, shares: Tensor) -> None:
    """out (B, 1, S, D) with a unit last stride = shares (B, H, S, D) float32, contiguous, summed over H in order."""
    batch, heads, s, d = shares.shape
    size = s * d
    args = (out, shares, heads, size, out.stride(0), out.stride(2))
    _kernel((batch * triton.cdiv(size, _BLOCK),), args, (d, _STEP, _BLOCK), num_warps=4)
