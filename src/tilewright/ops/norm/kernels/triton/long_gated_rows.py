"""RMSNorm with a gate in Triton, groups too long for registers.  A program reads one group of a row twice, in blocks.

The second read comes from L2.  In the backward the first read also sums wdy * u, and the weight gradient is one more
kernel over blocks of columns.  Formulas and names: `rms_norm_gated.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton.column_sums import mean_of
from tilewright.ops.norm.kernels.triton.gate import activate, weighted

BLOCK_N = 2048


@triton.jit
def _gated_long_kernel(
    y, x, gate, weight, GROUPS, SIZE, stride_x, stride_g, eps,  # y, x, gate: (M, GROUPS * SIZE)
    NORM_FIRST: tl.constexpr, FP32_WEIGHT: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row_idx = (tl.program_id(0) // GROUPS).to(tl.int64)
    first = tl.program_id(0) % GROUPS * SIZE
    # First read: rstd
    sum_squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, SIZE, BLOCK_N):
        mask = start + tl.arange(0, BLOCK_N) < SIZE
        col_offsets = first + start + tl.arange(0, BLOCK_N)
        u = tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32)
        if not NORM_FIRST:
            g_fp32 = tl.load(gate + row_idx * stride_g + col_offsets, mask=mask, other=0.0).to(tl.float32)
            act, _ = activate(g_fp32, SILU, PRECISE)
            u = u * act
        sum_squares += u * u
    rstd = tl.rsqrt(mean_of(tl.sum(sum_squares, 0), SIZE) + eps)
    # Second read: y
    for start in range(0, SIZE, BLOCK_N):
        mask = start + tl.arange(0, BLOCK_N) < SIZE
        col_offsets = first + start + tl.arange(0, BLOCK_N)
        u = tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32)
        g_fp32 = tl.load(gate + row_idx * stride_g + col_offsets, mask=mask, other=0.0).to(tl.float32)
        act, _ = activate(g_fp32, SILU, PRECISE)
        if not NORM_FIRST:
            u = u * act
        w = tl.load(weight + col_offsets, mask=mask, other=0.0).to(tl.float32)
        _, y_fp32 = weighted(u * rstd, w, x, weight, FP32_WEIGHT)
        if NORM_FIRST:
            y_fp32 = y_fp32 * act
        tl.store(y + row_idx * GROUPS * SIZE + col_offsets, y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _load_backward(
    dy, x, gate, row_idx, col_offsets, mask, stride_dy, stride_x, stride_g,
    NORM_FIRST: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """What was normalised, the gradient of its norm, dy, x, act(gate), act'(gate)."""
    x_fp32 = tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32)
    g_fp32 = tl.load(gate + row_idx * stride_g + col_offsets, mask=mask, other=0.0).to(tl.float32)
    dy_fp32 = tl.load(dy + row_idx * stride_dy + col_offsets, mask=mask, other=0.0).to(tl.float32)
    act, slope = activate(g_fp32, SILU, PRECISE)
    u = x_fp32
    dnorm = dy_fp32 * act
    if not NORM_FIRST:
        u = x_fp32 * act
        dnorm = dy_fp32
    return u, dnorm, dy_fp32, x_fp32, act, slope


@triton.jit
def _gated_backward_long_kernel(
    dx, dgate, rstds, dy, x, gate, weight, GROUPS, SIZE, stride_dy, stride_x, stride_g, eps,  # rstds: (M, GROUPS)
    NORM_FIRST: tl.constexpr, FP32_WEIGHT: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx and dgate of a group of a row; writes rstd too."""
    row_idx = (tl.program_id(0) // GROUPS).to(tl.int64)
    first = tl.program_id(0) % GROUPS * SIZE
    # First read: rstd and dot(wdy, u_hat)
    sum_squares = tl.zeros((BLOCK_N,), tl.float32)
    sum_wdy_u = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, SIZE, BLOCK_N):
        mask = start + tl.arange(0, BLOCK_N) < SIZE
        col_offsets = first + start + tl.arange(0, BLOCK_N)
        u, dnorm, _, _, _, _ = _load_backward(
            dy, x, gate, row_idx, col_offsets, mask, stride_dy, stride_x, stride_g, NORM_FIRST, SILU, PRECISE
        )
        w = tl.load(weight + col_offsets, mask=mask, other=0.0).to(tl.float32)
        sum_squares += u * u
        sum_wdy_u += dnorm * w * u
    rstd = tl.rsqrt(mean_of(tl.sum(sum_squares, 0), SIZE) + eps)
    mean_wdy_u_hat = mean_of(tl.sum(sum_wdy_u, 0) * rstd, SIZE)
    tl.store(rstds + tl.program_id(0), rstd)
    # Second read: dx and dgate
    for start in range(0, SIZE, BLOCK_N):
        mask = start + tl.arange(0, BLOCK_N) < SIZE
        col_offsets = first + start + tl.arange(0, BLOCK_N)
        u, dnorm, dy_fp32, x_fp32, act, slope = _load_backward(
            dy, x, gate, row_idx, col_offsets, mask, stride_dy, stride_x, stride_g, NORM_FIRST, SILU, PRECISE
        )
        w = tl.load(weight + col_offsets, mask=mask, other=0.0).to(tl.float32)
        u_hat = u * rstd
        du = (dnorm * w - u_hat * mean_wdy_u_hat) * rstd
        if NORM_FIRST:
            _, product = weighted(u_hat, w, x, weight, FP32_WEIGHT)
            dx_fp32 = du
            dgate_fp32 = dy_fp32 * product * slope
        else:
            dx_fp32 = du * act
            dgate_fp32 = du * x_fp32 * slope
        out_offsets = row_idx * GROUPS * SIZE + col_offsets
        tl.store(dx + out_offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + out_offsets, dgate_fp32.to(dgate.dtype.element_ty), mask=mask)


@triton.jit
def _gated_dweight_long_kernel(
    dweight, dy, x, gate, weight, rstds, M, GROUPS, SIZE, stride_dy, stride_x, stride_g,  # dweight: (GROUPS * SIZE,)
    NORM_FIRST: tl.constexpr, FP32_WEIGHT: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of the weight.  BLOCK_N columns a program."""
    col_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = col_idx < GROUPS * SIZE
    w = tl.load(weight + col_idx, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        row_idx = (start + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (row_idx < M) & col_mask[None, :]
        u, dnorm, _, _, _, _ = _load_backward(
            dy, x, gate, row_idx, col_idx[None, :], mask, stride_dy, stride_x, stride_g, NORM_FIRST, SILU, PRECISE
        )
        rstd = tl.load(rstds + row_idx * GROUPS + (col_idx // SIZE)[None, :], mask=mask, other=0.0)
        rounded, _ = weighted(u * rstd, w, x, weight, FP32_WEIGHT)
        acc += dnorm * rounded
    tl.store(dweight + col_idx, tl.sum(acc, 0).to(dweight.dtype.element_ty), mask=col_mask)


_forward = TritonKernel(_gated_long_kernel)
_backward = TritonKernel(_gated_backward_long_kernel)
_dweight = TritonKernel(_gated_dweight_long_kernel)

Options = tuple[bool, bool, bool, bool]
"""NORM_FIRST, FP32_WEIGHT, SILU, PRECISE."""


def launch(y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, size: int, eps: float, options: Options) -> None:
    """The forward.   x, gate: (M, N), rows.   weight: contiguous.   size: columns of a group."""
    m, n = x.shape
    parameters = (y, x, gate, weight, n // size, size, x.stride(0), gate.stride(0), eps)
    _forward((m * (n // size),), parameters, (*options, BLOCK_N), num_warps=8)


def launch_backward(
    gradients: tuple[Tensor, Tensor, Tensor | None],
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    size: int,
    eps: float,
    options: Options,
) -> None:
    """The backward.   gradients: dx, dgate, and dweight if it is needed.   dy, x, gate: (M, N), rows."""
    dx, dgate, dweight = gradients
    m, n = x.shape
    groups = n // size
    rstds = scratch((m, groups), torch.float32, x.device)
    strides = (dy.stride(0), x.stride(0), gate.stride(0))
    parameters = (dx, dgate, rstds, dy, x, gate, weight, groups, size, *strides, eps)
    _backward((m * groups,), parameters, (*options, BLOCK_N), num_warps=8)
    if dweight is not None:
        parameters = (dweight, dy, x, gate, weight, rstds, m, groups, size, *strides)
        _dweight((triton.cdiv(n, 64),), parameters, (*options, 64, 64), num_warps=8)
