"""Products of at most 16 rows by weights of 4 and 8 bits, in CUDA C++ for Hopper: from global memory to registers.

Traffic: the weight as stored, 4.25 bits an element for mxfp4, and its scales: 31.2 MB of 4096 x 14336 cannot take less
than 7.3 us at 4.3 TB/s.  At that rate a multiprocessor has 3.5 instructions for each element, and e2m1 numbers take
2.5: there is no shared memory and no barrier in the loop.  The kernel is `block_weights.cuh`.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.jit.compilers.kernel_args import I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.operands import copyable

CHUNK = 128
"""K is a multiple of it."""
MOST_ROWS = 16
INT4, MXFP4, NVFP4, MXFP8 = range(4)


class Config(NamedTuple):
    """tiles: of 16 channels, of a block.   warps: of a block, which share K.   depth: chunks of a warp on their way.

    ctas: blocks of a multiprocessor that registers leave room for.
    """

    tiles: int
    warps: int
    depth: int
    ctas: int


class Params(NamedTuple):
    """The compile-time constants of the kernel."""

    kFormat: int
    kTokens: int
    kTiles: int
    kWarps: int
    kDepth: int
    kCtas: int
    Element: torch.dtype
    Scale: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype


class Args(NamedTuple):
    """The parameters of the kernel."""

    d: Pointer
    x: Pointer
    q: Pointer
    scales: Pointer
    tensor_scale: Pointer
    bias: Pointer
    d_row: I64  # elements from row to row
    x_row: I64
    scale_pitch: I64  # elements from group to group, of integers
    m: I32
    n: I32
    k: I32


KERNEL = CudaKernel(
    Path(__file__).with_name("block_weights.cuh"), "block_weights", Args, archs=("sm_90a",), dependent=True
)

CONFIGS = (
    Config(1, 16, 1, 1),
    Config(2, 8, 2, 1),
    Config(1, 8, 2, 2),
    Config(1, 8, 1, 3),
    Config(1, 16, 2, 1),
    Config(1, 8, 4, 2),
    Config(1, 8, 2, 3),
    Config(1, 4, 2, 5),
    Config(1, 4, 4, 4),
    Config(2, 4, 2, 2),
)
"""The first won at up to 8 rows, the second at 16: H200, 2026-11, 4096x4096."""


def why_not(x: Tensor, q: Tensor) -> str | None:
    """Why the kernel cannot multiply these; None if it can."""
    arch = device_info(x.device).arch
    if arch != "sm_90":
        return f"is written for Hopper (sm_90), and this is {arch}"
    m, k = x.shape
    if not 0 < m <= MOST_ROWS:
        return f"is for 1 to {MOST_ROWS} rows, and x has {m}"
    if k % CHUNK or not k:
        return f"needs K to be a multiple of {CHUNK}, and it is {k}"
    if not (copyable(x) and copyable(q)):
        return "needs x, its rows and q at multiples of 16 bytes"
    return None


def multiply(
    d: Tensor, x: Tensor, q: Tensor, scales: Tensor, tensor_scale: Tensor | None, bias: Tensor | None, form: int,
    config: Config,
) -> None:  # fmt: skip
    """Writes x @ w.T + bias to d (M, N)."""
    (m, k), n = x.shape, q.shape[0]
    scale_type = scales.dtype if form == INT4 else torch.bfloat16
    params = Params(
        form, 8 if m <= 8 else 16, *config, x.dtype, scale_type, d.dtype, x.dtype if bias is None else bias.dtype
    )
    args = Args(d, x, q, scales, tensor_scale, bias, d.stride(0), x.stride(0), scales.stride(1), m, n, k)
    KERNEL((-(-n // (16 * config.tiles)),), args, params, block=32 * config.warps)
