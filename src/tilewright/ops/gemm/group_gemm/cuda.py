"""group_gemm in CUDA C++ for Hopper: the kernels of `matmul`, each started while the previous one ends.

Each product has its own tile size; in Triton's single launch all share that of the largest.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.dense import args as raw
from tilewright.ops.gemm.group_gemm import offsets
from tilewright.ops.gemm.kernels.sm90 import hopper_cuda

_PLAIN = (None, None, None, 1.0, "")  # bias, c, scale, alpha, activation


def _why_not(a: Tensor, b: Tensor, more_a: list[Tensor], more_b: list[Tensor], out_dtype: torch.dtype) -> str | None:
    reasons = (
        hopper_cuda.why_not(left, right, *_PLAIN, out_dtype)
        for left, right in zip((a, *more_a), (b, *more_b), strict=True)
    )
    return next((reason for reason in reasons if reason is not None), None)


@register_impl("group_gemm", backend="cuda", supports=_why_not)
def launch(
    outs: tuple[Tensor],
    a: Tensor,
    b: Tensor,
    more_a: list[Tensor],
    more_b: list[Tensor],
    out_dtype: torch.dtype,
    *,
    config: None,
) -> None:
    """Launches once for each nonempty product; a product with K = 0 is zero."""
    lefts, rights = (a, *more_a), (b, *more_b)
    for left, right, offset, m, n in zip(lefts, rights, *offsets(a, b, more_a, more_b), strict=True):
        d = outs[0][offset : offset + m * n].view(m, n)
        if not left.shape[1]:
            d.zero_()
        elif d.numel():
            bucket = raw.bucket(left, right, *_PLAIN, out_dtype)
            config_of_product = hopper_cuda.configure(bucket, left.dtype)
            hopper_cuda.gemm(d[None], left[None], right[None], *_PLAIN, config_of_product)
