"""Groups of rows in CUDA C++ for Hopper: the dense kernels with a tile scheduler that reads the groups.

Tiles, ring and epilogue are those of `dense_cuda.py` (bf16, fp16) and `fp8_cuda.py` (e4m3 with scales) in
`ops/gemm/engines`; only the tile scheduler differs.  Each block counts the tiles of every group at its start and finds
the group of a tile by bisection, so that the number of groups costs nothing later.  Groups begin at any row: a tile may
read rows of the next group, which are not stored, and the 64 rows in which a group ends are written by ordinary stores
instead of TMA.  A group of R rows costs ceil(R / block_m) rows of tiles; 64 rows of a tile that are all outside are not
multiplied.

If few rows a group are expected, reading the weights dominates, and `few_rows/grouped.py` runs.
"""

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.ops.gemm.grouped.args import UNSCALED
from tilewright.ops.gemm.kernels.sm90 import dense as dense_cuda
from tilewright.ops.gemm.kernels.sm90 import few_rows_grouped as few_rows
from tilewright.ops.gemm.kernels.sm90 import fp8 as fp8_cuda
from tilewright.ops.gemm.kernels.sm90.config_cuda import Config, named, own
from tilewright.ops.gemm.kernels.sm90.dense import Groups
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS
from tilewright.ops.gemm.operands import Major, major_a

__all__ = ["CONFIGS", "Config", "candidates", "configure", "gemm", "why_not"]

_A_ALONG_K = (0, 1)  # the layouts nt and nn


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    expected: int,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why these kernels cannot run these arguments; None if they can."""
    arch = device_info(a.device).arch
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if not a.shape[-1]:
        return "has no tiles for K = 0"
    if scale_a is None or scale_b is None:
        if major_a(a) is not Major.K:  # groups begin at any row, and a copy at multiples of 16 bytes of a line
            return "needs a contiguous along K"
        return dense_cuda.why_not(a, b, None, None, None, 1.0, activation, out_dtype)
    return fp8_cuda.why_not(a, b, scale_a, scale_b, None, None, 1.0, activation, out_dtype)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    activation: str,
    config: Config,
) -> None:
    """d = rows of each group of a @ b of the group.  See `engines/__init__.py`."""
    if not d.numel():
        return
    if config.kernel == "few_rows":
        few_rows.gemm(d, a, b, scale_a, scale_b, starts, ends, activation, own(config))
        return
    batched = a.shape[0] == b.shape[0]  # a single group begins at row 0 of the only matrix either way
    groups = Groups(dense_cuda.ROWS, b.shape[0], 0 if starts is None else starts, ends, batched)
    if scale_a is None or scale_b is None:
        dense_cuda.gemm(d, a, b, None, None, None, 1.0, activation, own(config), groups)
    else:
        fp8_cuda.gemm(d, a, b, scale_a, scale_b, None, None, 1.0, activation, own(config), groups)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Returns the choice of the dense cost model for a batch of products of the expected rows."""
    if _few(bucket):
        return named("few_rows", few_rows.configure(bucket, dtype))
    return _large(bucket, dtype)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the configs for the tuner, of both kinds if both can run."""
    few = few_rows.candidates(bucket, dtype) if _few(bucket) else ()
    return (*(named("few_rows", config) for config in few), *_large(bucket, dtype))


def _few(bucket: tuple[int, ...]) -> bool:
    return bucket[0] <= MAX_ROWS and bucket[4] in _A_ALONG_K


def _large(bucket: tuple[int, ...], dtype: torch.dtype) -> list[Config]:
    """Returns configs, best first; clusters along M come last, as they pad each group to pairs of row tiles."""
    rows, n, k, groups, layout, aligned, out_bits, gated, scaling = bucket
    product, groups = (rows, n, k, layout, aligned, out_bits, gated), max(1, groups)
    configs: list[Config]
    if scaling == UNSCALED:
        configs = [named("dense", config) for config in dense_cuda.candidates(product, dtype, groups)]
    else:
        configs = [named("fp8", config) for config in fp8_cuda.candidates((*product, scaling), dtype, groups)]
    return sorted(configs, key=lambda config: config.cluster_m)


CONFIGS: tuple[Config, ...] = (
    *(named("few_rows", config) for config in few_rows.CONFIGS),
    *(named("dense", config) for config in dense_cuda.CONFIGS),
    *(named("fp8", config) for config in fp8_cuda.CONFIGS),
)
"""Every config that `configure` can return on a GPU of 132 multiprocessors."""
