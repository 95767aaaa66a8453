"""The split-K reduction in Triton: each program sums one block of the result over all parts, in order.

Traffic: 4*S*M*N bytes read, M*N_out written; S=8, 64x576 is 1.2 MB, less than the launch of about 2 us.  Memory latency
is what costs, so the kernel waits for it once: a thread has loads of 16 bytes of up to 8 parts in flight before it adds
the first, and blocks are so small that every SM has some.  Without a bias the result is treated as one row.  The order
of the sum does not depend on the block, so every run gives the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.operands import columns_out
from tilewright.ops.gemm.splitk_reduce import FORWARD, SplitkReduceArgs, SplitkReduceBucket


class Config(NamedTuple):
    """block_n: columns of every part that a program reads, four a thread; half as many of a gated result."""

    block_n: int
    num_warps: int


_CONFIGS = (Config(128, 1), Config(256, 2), Config(512, 4))
_PROGRAMS = 264  # two for each SM of an H200
PARTS_IN_FLIGHT = tl.constexpr(8)  # loads of 8 parts; with 16, ptxas splits them into two rounds anyway


def configure(bucket: SplitkReduceBucket, dtype: torch.dtype) -> Config:
    """Returns the widest block that leaves enough programs, else the narrowest."""
    return next((config for config in _CONFIGS[::-1] if _PROGRAMS * config.block_n <= bucket.M * bucket.N), _CONFIGS[0])


def candidates(bucket: SplitkReduceBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns every block."""
    return _CONFIGS


@triton.jit
def _splitk_reduce_kernel(
    d, partials, bias, c, S, M, N, N_OUT, stride_c,  # d: (M, N_OUT)  partials: (S, M, N)  bias: (N,)  c: (M, N_OUT)
    HAS_BIAS: tl.constexpr, HAS_C: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, MORE: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    BLOCK_OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row = tl.zeros([], tl.int64) if FLAT else tl.program_id(0).to(tl.int64)
    block = tl.program_id(0 if FLAT else 1).to(tl.int64)
    # Sum the parts, in order
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    ptrs = partials + row * N + offs_n
    size = tl.full([], 1, tl.int64) * M * N  # M = 1 is a constexpr here, which cannot be cast
    z = _add_parts(tl.load(ptrs, mask=mask, other=0.0), ptrs + size, size, mask, FIRST - 1)
    if MORE:
        for s in range(FIRST, S, PARTS_IN_FLIGHT):
            z = _add_parts(z, ptrs + s * size, size, mask, PARTS_IN_FLIGHT)
    # Epilogue: bias, activation, C
    if HAS_BIAS:
        z += tl.load(bias + offs_n, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(z, [BLOCK_OUT, 2]))
        z = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)  # keeps NaN, which tl.maximum may drop
    elif ACTIVATION == "gelu":
        # gelu(z) = z * sigmoid(2u), u = sqrt(2/pi) * (z + 0.044715 z^3)
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    offs_out = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask_out = offs_out < N_OUT
    if HAS_C:
        z += tl.load(c + row * stride_c + offs_out, mask=mask_out, other=0.0).to(tl.float32)
    tl.store(d + row * N_OUT + offs_out, z.to(d.dtype.element_ty), mask=mask_out)


@triton.jit
def _add_parts(z, ptrs, size, mask, PARTS: tl.constexpr):
    """Returns z plus the parts at `ptrs`, ptrs + size, ..., in order; all loads come before the first addition."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (tl.load(ptrs + i * size, mask=mask, other=0.0),)
    for i in tl.static_range(PARTS):
        z += parts[i]
    return z


_kernel = TritonKernel(_splitk_reduce_kernel)
# Without a limit ptxas uses 32 registers, for full occupancy, and the fifth load waits for an addition
_kernel_nvidia = TritonKernel(_splitk_reduce_kernel, maxnreg=64)


def why_not(args: SplitkReduceArgs) -> str | None:
    has_float64 = any(t is not None and t.dtype == torch.float64 for t in (args.partials, args.bias, args.c))
    return "has no float64" if has_float64 else None


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=_CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: SplitkReduceArgs, config: Config) -> None:
    partials, bias, c, activation, _ = args
    s, m, n = partials.shape
    n_out = columns_out(n, activation)
    flat = bias is None and (c is None or c.stride(0) == n_out)
    if flat:  # treat the result as one row
        m, n, n_out = 1, m * n, m * n_out
    pointers_and_sizes = (outs[0], partials, bias, c, s, m, n, n_out, 0 if c is None else c.stride(0))
    first = (s - 1) % PARTS_IN_FLIGHT.value + 1  # the remaining parts are a multiple of PARTS_IN_FLIGHT
    constants = (bias is not None, c is not None, activation, first, s > first, flat, config.block_n)
    blocks = triton.cdiv(n, config.block_n)
    kernel = _kernel_nvidia if target_of(partials).startswith("sm_") else _kernel
    kernel((blocks,) if flat else (m, blocks), pointers_and_sizes, constants, num_warps=config.num_warps)
