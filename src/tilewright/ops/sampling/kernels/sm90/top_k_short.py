"""top_k of short rows in CUDA C++: a warp holds a row of at most 1024 elements in registers, for k up to 32.

4096 x 256 float32, 4 MB read, cannot take less than 1 us at 4.4 TB/s.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.rows import as_rows, no_float64
from tilewright.ops.sampling.kernels.sm90 import resident
from tilewright.ops.sampling.top_k import FORWARD, TopKArgs, TopKBucket

LONGEST, MOST = 1024, 32


class Config(NamedTuple):
    """warps: of a block, each with a row."""

    warps: int


class Params(NamedTuple):
    """The compile-time constants of top_k_short."""

    kWarps: int
    kEach: int
    Element: torch.dtype


class Args(NamedTuple):
    """The parameters of top_k_short."""

    values: Pointer
    indices: Pointer
    x: Pointer
    stride: I64
    rows: I32
    n: I32
    k: I32


KERNEL = CudaKernel(Path(__file__).with_name("top_k_short.cuh"), "top_k_short", Args, archs=("sm_90",), dependent=True)
CONFIGS = (Config(4),)


def why_not(args: TopKArgs) -> str | None:
    """Why this kernel cannot run a call; None if it can."""
    if args.x.shape[1] > LONGEST or args.k > MOST:
        return f"takes rows of up to {LONGEST} and k up to {MOST}, got {args.x.shape[1]} and {args.k}"
    return resident.why_not_arch(args.x) or no_float64(args.x)


def configure(bucket: TopKBucket, dtype: torch.dtype) -> Config | None:
    """Chooses four warps a block.  Unmeasured."""
    return CONFIGS[0] if bucket.N <= LONGEST and bucket.K <= MOST else None


def candidates(bucket: TopKBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return (Config(2), Config(4), Config(8)) if configure(bucket, dtype) else ()


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: TopKArgs, config: Config) -> None:
    x = as_rows(args.x)
    m, n = x.shape
    each = max(1, 1 << (-(-n // 32) - 1).bit_length())
    KERNEL(
        (-(-m // config.warps),),
        Args(*outs, x, x.stride(0), m, n, args.k),
        Params(config.warps, each, x.dtype),
        block=config.warps * 32,
    )
