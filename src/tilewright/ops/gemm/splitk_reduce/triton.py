"""Split-K's last step in Triton: each program adds one block of columns of one row through all parts, in order.

Traffic: 4*S*M*N bytes read, M*N_out written; S=8, 64x576 is 1.2 MB, a launch of about 2 us that no bandwidth shortens.
A block is at most 1024 columns, so that 64 rows of a narrow layer still fill the SMs.  The parts are read in a loop of
independent loads; only their sum is in order, so the result has the same bits on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.operands import columns_out


class Config(NamedTuple):
    """block_n: columns of the result a program writes."""

    block_n: int
    num_warps: int


_CONFIGS = (Config(128, 1), Config(256, 2), Config(1024, 4))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The narrowest block that covers a row, so that few rows make many programs, up to 1024 columns."""
    _, n, _ = bucket
    return next((config for config in _CONFIGS if n <= config.block_n), _CONFIGS[-1])


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Every block: the widest that is not mostly padding is not always the fastest."""
    return _CONFIGS


@triton.jit
def _splitk_reduce_kernel(
    d, partials, bias, c, S, M, N, N_OUT, stride_c,  # d: (M, N_OUT)  partials: (S, M, N)  bias: (N,)  c: (M, N_OUT)
    HAS_BIAS: tl.constexpr, HAS_C: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N_OUT
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    first = offs_n * 2 if GATED else offs_n
    z = _sum_of_parts(partials, bias, row, first, mask, S, M, N, HAS_BIAS)
    if GATED:
        up = _sum_of_parts(partials, bias, row, first + 1, mask, S, M, N, HAS_BIAS)
        z = z * tl.sigmoid(z) * up
    elif ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)  # keeps NaN, which a maximum may drop
    elif ACTIVATION == "gelu":
        # gelu(z) = z * sigmoid(2u), u = sqrt(2/pi) * (z + 0.044715 z^3)
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    if HAS_C:
        z += tl.load(c + row * stride_c + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(d + row * N_OUT + offs_n, z.to(d.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_parts(partials, bias, row, columns, mask, S, M, N, HAS_BIAS: tl.constexpr):
    at = partials + row * N + columns
    z = tl.load(at, mask=mask, other=0.0)
    size = tl.full([], 1, tl.int64) * M * N  # Triton makes a Python integer of M = 1, which has no dtype to widen
    for s in range(1, S):
        z += tl.load(at + s * size, mask=mask, other=0.0)
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return z


_kernel = TritonKernel(_splitk_reduce_kernel)


def _supports(
    partials: Tensor, bias: Tensor | None, c: Tensor | None, activation: str, out_dtype: torch.dtype
) -> str | None:
    wide = any(t is not None and t.dtype == torch.float64 for t in (partials, bias, c))
    return "has no float64" if wide else None


@register_impl(
    "splitk_reduce",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=_CONFIGS,
    candidates=candidates,
    supports=_supports,
)
def launch(
    outs: tuple[Tensor],
    partials: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    *,
    config: Config,
) -> None:
    s, m, n = partials.shape
    n_out = columns_out(n, activation)
    args = (outs[0], partials, bias, c, s, m, n, n_out, 0 if c is None else c.stride(0))
    constants = (bias is not None, c is not None, activation, config.block_n)
    _kernel((m, triton.cdiv(n_out, config.block_n)), args, constants, num_warps=config.num_warps)
