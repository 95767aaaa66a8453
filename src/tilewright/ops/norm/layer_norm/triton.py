"""LayerNorm in Triton.  A program holds whole rows in registers, so mean and variance are two passes over one read.

The second pass also sums the deviations, which a mean off by an ULP shifts, and takes their mean out of them: so a row
of one value gives zeros, however large the value and however small eps (Chan, Golub, LeVeque, 1983), and a mean may be
a product with 1 / N, of which a division for each row would need registers that the backward does not have.

Traffic: forward 4*M*N bytes at bf16, backward 6*M*N; the same floors as RMSNorm.  The backward recomputes mean and
1/std from the row it reads, and sums the gradients of weight and bias in a fixed order (`column_sums`).
Rows too long for registers are walked in blocks: mean, then variance about it, then the output; re-reads come from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.column_sums import column_sums
from tilewright.ops.norm.rms_norm.triton import (
    MAX_BLOCK,
    Config,
    WalkConfig,
    candidates,
    candidates_backward,
    configure_backward,
    every,
    programs,
)
from tilewright.ops.rows import as_rows


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    m, n = bucket
    block = min(triton.next_power_of_2(n), MAX_BLOCK)
    if block <= 512:
        return Config(rows=max(1, min(8, 2048 // block)), num_warps=4)
    # Two rows hide each other's two reductions: 35.4 us against 36.4 with one at 8192x4096, 16.8 against 18.0 at
    # 8192x1600 (H200, 2026-11).  A few rows are all latency: one each, and more warps.
    rows = 2 if m >= 1024 and block <= 8192 else 1
    return Config(rows, num_warps=min(16, max(4, rows * block // (1024 if rows == 2 else 512))))


@triton.jit
def _load_affine(weight, bias, offs_n, N, default: tl.constexpr):
    """Weight and bias of some columns in float32; None gives `default` and 0."""
    w = tl.full(offs_n.shape, default, tl.float32)
    b = tl.zeros(offs_n.shape, tl.float32)
    if weight is not None:
        w = tl.load(weight + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(a, b, AXIS: tl.constexpr):
    """Sums of a and of b along one axis, in one exchange between threads."""
    return tl.reduce((a, b), AXIS, _add_both)


@triton.jit
def _variance(deviation, square, part):
    """(mean deviation, variance) of the sums of deviations from nearly the mean and of their squares; part: 1 / N."""
    shift = deviation * part
    left = tl.where(square < float("inf"), tl.maximum(square - deviation * shift, 0.0), square)  # NaN stays too
    return shift, left * part


@triton.jit
def _centred(wide, mask, part):
    """Rows (ROWS, BLOCK_N) without their means, and the variances (ROWS,).   part: 1 / N."""
    centred = tl.where(mask, wide - (tl.sum(wide, 1) * part)[:, None], 0.0)
    deviation, square = _sums(centred, centred * centred, 1)
    shift, variance = _variance(deviation, square, part)
    return tl.where(mask, centred - shift[:, None], 0.0), variance


@triton.jit
def _layer_norm_kernel(
    y, x, weight, bias, M, N, stride_x, eps,  # x, y: (M, N)   weight, bias: (N,) or None
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    w, b = _load_affine(weight, bias, offs_n, N, 1.0)
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = offs_m.to(tl.int64)[:, None]
    mask = (offs_m[:, None] < M) & mask_n[None, :]
    wide = tl.load(x + at * stride_x + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
    centred, variance = _centred(wide, mask, tl.div_rn(1.0, N + 0.0))
    result = centred * tl.rsqrt(variance + eps)[:, None] * w[None, :] + b[None, :]
    tl.store(y + at * N + offs_n[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _row_statistics(x, row, N, stride_x, eps, BLOCK_N: tl.constexpr):
    """(mean, 1/std) of one long row, the variance taken about the mean."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        total += tl.load(x + row * stride_x + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    part = tl.div_rn(1.0, N + 0.0)
    mean = tl.sum(total, 0) * part
    deviations = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        wide = tl.load(x + row * stride_x + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        centred = tl.where(offs_n < N, wide - mean, 0.0)
        deviations += centred
        squares += centred * centred
    deviation, square = _sums(deviations, squares, 0)
    shift, variance = _variance(deviation, square, part)
    return mean + shift, tl.rsqrt(variance + eps)


@triton.jit
def _layer_norm_long_kernel(y, x, weight, bias, N, stride_x, eps, BLOCK_N: tl.constexpr):  # as above, one row a program
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = _row_statistics(x, row, N, stride_x, eps, BLOCK_N)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        w, b = _load_affine(weight, bias, offs_n, N, 1.0)
        wide = tl.load(x + row * stride_x + offs_n, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + row * N + offs_n, ((wide - mean) * rstd * w + b).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_backward_kernel(
    dx, partial_w, partial_b, dy, x, weight, M, N, stride_dy, stride_x, eps,  # partial_*: (programs, N)
    AFFINE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    w, _ = _load_affine(weight, None, offs_n, N, 1.0)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    part = tl.div_rn(1.0, N + 0.0)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        offs_m = block * ROWS + tl.arange(0, ROWS)
        at = offs_m.to(tl.int64)[:, None]
        mask = (offs_m[:, None] < M) & mask_n[None, :]
        wide = tl.load(x + at * stride_x + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + at * stride_dy + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        centred, variance = _centred(wide, mask, part)
        rstd = tl.where(offs_m < M, tl.rsqrt(variance + eps), 0.0)[:, None]  # without eps of no row: infinite
        normed = centred * rstd
        g = grad * w[None, :]
        mean_g, mean_gn = (tl.sum(g, 1) * part)[:, None], (tl.sum(g * normed, 1) * part)[:, None]
        result = (g - mean_g - normed * mean_gn) * rstd
        tl.store(dx + at * N + offs_n[None, :], result.to(dx.dtype.element_ty), mask=mask)
        if AFFINE:
            dw += tl.sum(grad * normed, 0)
            db += tl.sum(grad, 0)
    if AFFINE:
        at_partial = tl.program_id(0).to(tl.int64) * N + offs_n
        tl.store(partial_w + at_partial, dw, mask=mask_n)
        tl.store(partial_b + at_partial, db, mask=mask_n)


@triton.jit
def _layer_norm_backward_long_kernel(
    dx, means, rstds, dy, x, weight, N, stride_dy, stride_x, eps, BLOCK_N: tl.constexpr,  # means, rstds: (M,)
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = _row_statistics(x, row, N, stride_x, eps, BLOCK_N)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)
    sum_g = tl.zeros((BLOCK_N,), tl.float32)
    sum_gn = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        w, _ = _load_affine(weight, None, offs_n, N, 1.0)
        g = tl.load(dy + row * stride_dy + offs_n, mask=mask, other=0.0).to(tl.float32) * w
        normed = (tl.load(x + row * stride_x + offs_n, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        sum_g += g
        sum_gn += g * normed  # g is 0 beyond N
    part = tl.div_rn(1.0, N + 0.0)
    mean_g, mean_gn = tl.sum(sum_g, 0) * part, tl.sum(sum_gn, 0) * part
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        w, _ = _load_affine(weight, None, offs_n, N, 1.0)
        g = tl.load(dy + row * stride_dy + offs_n, mask=mask, other=0.0).to(tl.float32) * w
        normed = (tl.load(x + row * stride_x + offs_n, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        tl.store(dx + row * N + offs_n, ((g - mean_g - normed * mean_gn) * rstd).to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_affine_long_kernel(
    dweight, dbias, dy, x, means, rstds, M, N, stride_dy, stride_x,  # dweight, dbias: (N,)
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        at = offs_m.to(tl.int64)[:, None]
        mask = (offs_m[:, None] < M) & mask_n[None, :]
        mean = tl.load(means + offs_m, mask=offs_m < M, other=0.0)[:, None]
        rstd = tl.load(rstds + offs_m, mask=offs_m < M, other=0.0)[:, None]
        grad = tl.load(dy + at * stride_dy + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        wide = tl.load(x + at * stride_x + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        dw += grad * (wide - mean) * rstd
        db += grad
    tl.store(dweight + offs_n, tl.sum(dw, 0).to(dweight.dtype.element_ty), mask=mask_n)
    tl.store(dbias + offs_n, tl.sum(db, 0).to(dbias.dtype.element_ty), mask=mask_n)


_forward = TritonKernel(_layer_norm_kernel)
_forward_long = TritonKernel(_layer_norm_long_kernel)
_backward = TritonKernel(_layer_norm_backward_kernel)
_backward_long = TritonKernel(_layer_norm_backward_long_kernel)
_affine_long = TritonKernel(_layer_norm_affine_long_kernel)


@register_impl(
    "layer_norm",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=every(configure),
    candidates=candidates,
)
def launch(
    outs: tuple[Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, config: Config
) -> None:
    rows = as_rows(x)
    m, n = rows.shape
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    block = triton.next_power_of_2(n)
    if block > MAX_BLOCK:
        _forward_long((m,), (outs[0], rows, weight, bias, n, rows.stride(0), eps), (4096,), num_warps=8)
    else:
        args = (outs[0], rows, weight, bias, m, n, rows.stride(0), eps)
        _forward((triton.cdiv(m, config.rows),), args, (config.rows, block), num_warps=config.num_warps)


@register_impl(
    "layer_norm",
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=WalkConfig,
    configs=every(configure_backward),
    candidates=candidates_backward,
)
def launch_backward(
    outs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    need_dweight: bool,
    need_dbias: bool,
    *,
    config: WalkConfig,
) -> None:
    dx, dweight, dbias = outs
    affine = need_dweight or need_dbias
    grads, rows = as_rows(dy), as_rows(x)
    weight = None if weight is None else weight.contiguous()
    m, n = rows.shape
    block = triton.next_power_of_2(n)
    if block > MAX_BLOCK:
        means, rstds = scratch((m,), torch.float32, x.device), scratch((m,), torch.float32, x.device)
        args = (dx, means, rstds, grads, rows, weight, n, grads.stride(0), rows.stride(0), eps)
        _backward_long((m,), args, (2048,), num_warps=8)
        if affine:
            # one kernel makes both; the one nobody wants goes to scratch
            dw, db = (t if t.numel() else x.new_empty(n) for t in (dweight, dbias))
            tail = (dw, db, grads, rows, means, rstds, m, n, grads.stride(0), rows.stride(0))
            _affine_long((triton.cdiv(n, 64),), tail, (64, 64), num_warps=8)
        return
    count = programs(m, config, x.device)
    partial = scratch((2, count if affine else 1, n), torch.float32, x.device)
    args = (dx, partial[0], partial[1], grads, rows, weight, m, n, grads.stride(0), rows.stride(0), eps)
    constants = (affine, config.rows, block, config.num_stages)
    _backward((count,), args, constants, num_warps=config.num_warps)
    if need_dweight:
        column_sums(dweight, partial[0])
    if need_dbias:
        column_sums(dbias, partial[1])
