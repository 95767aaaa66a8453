"""Groups along K in CUDA C++ for Hopper: D[g] = A[:, group g] @ B[group g, :] + C[g], gradients of experts' weights.

Tiles, ring and epilogue are those of `dense_cuda.py` (bf16, fp16) and `fp8_cuda.py` (e4m3, 1x128 scales of both) in
`ops/gemm/engines`; K of a tile begins where its group does.  16-bit groups end at any K: the part of the last stage
that belongs to the next group, which may be NaN, is overwritten with zeros in shared memory, in both operands.  That
takes 128 threads some 300 cycles, during the WGMMAs of the previous k block.  Groups of e4m3 end at multiples of 128.

If C is D in float32, TMA adds, and empty groups cost nothing; otherwise they become C, or zeros.  Blocks take tiles of
all groups in turn; K is not split, so one group of long K with few tiles is slow.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.ops.gemm.grouped.args import UNSCALED
from tilewright.ops.gemm.k_grouped_matmul.raw import whole_blocks
from tilewright.ops.gemm.kernels.sm90 import dense as dense_cuda
from tilewright.ops.gemm.kernels.sm90 import fp8 as fp8_cuda
from tilewright.ops.gemm.kernels.sm90.config_cuda import Config, named, own
from tilewright.ops.gemm.kernels.sm90.dense import Groups
from tilewright.ops.gemm.operands import Major, major_a, major_b

__all__ = ["CONFIGS", "Config", "candidates", "configure", "gemm", "why_not"]


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    c: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
) -> str | None:
    """Why these kernels cannot run these arguments; None if they can."""
    arch = device_info(a.device).arch
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if c is not None and c.shape[-1] > 1 and c.stride(-1) != 1:
        return "needs c contiguous along N"
    if scale_a is None or scale_b is None:
        if major_a(a) is not Major.MN or major_b(b) is not Major.MN:
            # Groups begin at any K, TMA boxes at multiples of 16 bytes along the contiguous dimension
            return "needs a contiguous along M and b along N"
        return dense_cuda.why_not(a, b, None, c, None, 1.0, "", out_dtype)
    reason = fp8_cuda.why_not(a, b, scale_a, scale_b, None, c, 1.0, "", out_dtype)
    return reason or whole_blocks(scale_a, a)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    c: Tensor | None,
    ends: Tensor,
    config: Config,
) -> None:
    """d[g] = the product of group g + c[g].  See `engines/__init__.py`."""
    if not d.numel():
        return
    if b.shape[0] == 0:  # K is 0, which no tensor map can describe
        d.zero_() if c is None else d.copy_(c)
        return
    groups = Groups(dense_cuda.DEPTH, ends.shape[0], 0, ends)
    if scale_a is None or scale_b is None:
        dense_cuda.gemm(d, a[None], b[None], None, c, None, 1.0, "", own(config), groups)
    else:
        scales = scale_a[None], scale_b[None]
        fp8_cuda.gemm(d, a[None], b[None], *scales, None, c, 1.0, "", own(config), groups)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Returns the choice of the dense cost model for a batch of products with equal shares of K."""
    kernel, engine, product, groups = _products(bucket)
    return named(kernel, engine.configure(product, dtype, groups))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the configs for the tuner."""
    kernel, engine, product, groups = _products(bucket)
    return tuple(named(kernel, config) for config in engine.candidates(product, dtype, groups))


def _products(bucket: tuple[int, ...]) -> tuple[str, Any, tuple[int, ...], int]:
    """Returns the kernel's name and engine, the bucket of the product of one group, and the number of groups."""
    depth, m, n, groups, layout, aligned, out_bits, scaling = bucket
    groups = max(1, groups)
    product = (m, n, max(1, depth // groups), layout, aligned, out_bits, 0)
    if scaling == UNSCALED:
        return "dense", dense_cuda, product, groups
    return "fp8", fp8_cuda, (*product, scaling), groups


CONFIGS: tuple[Config, ...] = (
    *(named("dense", config) for config in dense_cuda.CONFIGS),
    *(named("fp8", config) for config in fp8_cuda.CONFIGS),
)
"""Every config that `configure` can return on a GPU of 132 multiprocessors."""
