"""RMSNorm with a gate in Triton.  A program holds groups of `group_size` columns of several rows in registers.

Forward:   gate last:   y = x_hat * w * act(gate), x_hat = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps)
           gate first:  the same without the last factor, of u = x * act(gate) in place of x.
Backward:  gate last:   with t = dy * act(gate) and wt = w * t,
               dx = rstd * (wt - x_hat * (1 / n) * dot(wt, x_hat)), dgate = dy * w * x_hat * act'(gate)
           and, summed over the rows, dweight = sum(t * x_hat);
           gate first:  with wdy = w * dy and du as dx above, of u, u_hat and wdy,
               dx = du * act(gate), dgate = du * x * act'(gate)
           and dweight = sum(dy * u_hat).
Without fp32_weight x_hat is rounded to x's dtype before it is multiplied by the weight, and so is that product before
the gate where it has x's dtype.

The backward recomputes rstd and act(gate), so the forward saves nothing.  Persistent programs, each for one group of
columns, accumulate the weight gradient in registers; `column_sums` adds their results in a fixed order.
Traffic: forward 6*M*N bytes at bf16; backward reads dy, x and gate and writes dx and dgate, 10*M*N.
Long groups take the kernels of `gated_parts.py`, backwards, and of `long_gated_rows.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware import device_info
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.norm.kernels.triton import gated_parts, long_gated_rows
from tilewright.ops.norm.kernels.triton.column_sums import column_sums, mean_of
from tilewright.ops.norm.kernels.triton.gate import activate, weighted
from tilewright.ops.norm.kernels.triton.moments import sum_pair
from tilewright.ops.norm.kernels.triton.row_blocks import Config, PersistentConfig, every
from tilewright.ops.norm.rms_norm_gated import BACKWARD, FORWARD, RmsNormGatedArgs, RmsNormGatedBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows, no_float64

MAX_BLOCK = 8192  # 16 values of x, of gate and of w a thread at 16 warps
MAX_BLOCK_BACKWARD = 4096  # 8 values, of dy and dw too, at 16 warps; twice as many spill on sm_90
Args = RmsNormGatedArgs | RmsNormGatedBackwardArgs


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """16 elements of x a thread."""
    block = min(triton.next_power_of_2(bucket.N), MAX_BLOCK)
    return Config(rows=max(1, min(8, 2048 // block)), num_warps=min(16, max(4, block // 512)))


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> PersistentConfig:
    """8 elements of x a thread and 16 warps an SM, or in 16 bits 8 warps and more blocks in flight: 262144 rows of 128
    take 123 us, and 139 of them by 16 warps (H100, 2026-11).
    """
    if gated_parts.takes(bucket.N, dtype):
        return gated_parts.configure(bucket, dtype)
    block = min(triton.next_power_of_2(bucket.N), MAX_BLOCK_BACKWARD)
    num_warps = max(4, block // 256)
    rows = max(1, min(8, 1024 // block))
    if dtype.itemsize == 2 and num_warps == 4:
        return PersistentConfig(*((2, 4, 3, 2) if block == 1024 else (rows, 4, 4, 2)))
    return PersistentConfig(rows, num_warps, 3 if dtype.itemsize == 2 else 2, ctas_per_sm=16 // num_warps)


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 4 to 32 elements of x a thread."""
    block = triton.next_power_of_2(bucket.N)
    if block > MAX_BLOCK:
        return ()
    return tuple(
        Config(rows, warps)
        for rows in (1, 2, 4, 8, 16)
        for warps in (1, 2, 4, 8, 16)
        if rows <= bucket.M and 4 <= rows * block // (32 * warps) <= 32
    )


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[PersistentConfig, ...]:
    """Configurations with 4 to 16 elements of x a thread; the stages fit the shared memory of an H200."""
    if gated_parts.takes(bucket.N, dtype):
        return gated_parts.candidates(bucket, dtype)
    block = triton.next_power_of_2(bucket.N)
    if block > MAX_BLOCK_BACKWARD:
        return ()
    return tuple(
        PersistentConfig(rows, warps, stages, ctas_per_sm)
        for rows in (1, 2, 4, 8)
        for warps in (4, 8, 16)
        for stages in (2, 3, 4)
        for ctas_per_sm in (1, 2, 4, 8)
        if rows <= bucket.M
        and 4 <= rows * block // (32 * warps) <= 16
        and ctas_per_sm * stages * 3 * rows * block * dtype.itemsize <= 200 << 10
        and 8 <= ctas_per_sm * warps <= 32
    )


def why_not(args: Args) -> str | None:
    return no_float64(*args)


@triton.jit
def _rms_norm_gated_kernel(
    y, x, gate, weight, M, GROUPS, SIZE, stride_x, stride_g, eps,  # y, x, gate: (M, GROUPS * SIZE)
    NORM_FIRST: tl.constexpr, FP32_WEIGHT: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Load the weight
    group = tl.program_id(0) % GROUPS
    col_mask = tl.arange(0, BLOCK_N) < SIZE
    col_offsets = group * SIZE + tl.arange(0, BLOCK_N)
    w = tl.load(weight + col_offsets, mask=col_mask, other=0.0).to(tl.float32)
    # Load the rows
    row_idx = tl.program_id(0) // GROUPS * ROWS + tl.arange(0, ROWS)
    row_offsets = row_idx.to(tl.int64)[:, None]
    mask = (row_idx[:, None] < M) & col_mask[None, :]
    x_fp32 = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
    g_fp32 = tl.load(gate + row_offsets * stride_g + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
    act, _ = activate(g_fp32, SILU, PRECISE)
    # Normalise
    if not NORM_FIRST:
        x_fp32 = x_fp32 * act
    rstd = tl.rsqrt(mean_of(tl.sum(x_fp32 * x_fp32, 1), SIZE) + eps)
    # Scale by the weight and store
    _, y_fp32 = weighted(x_fp32 * rstd[:, None], w[None, :], x, weight, FP32_WEIGHT)
    if NORM_FIRST:
        y_fp32 = y_fp32 * act
    tl.store(y + row_offsets * GROUPS * SIZE + col_offsets[None, :], y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_gated_backward_kernel(
    dx, dgate, dw_partial, dy, x, gate, weight, M, GROUPS, SIZE, stride_dy, stride_x, stride_g, eps,
    NORM_FIRST: tl.constexpr, FP32_WEIGHT: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr,
    NEED_DWEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip  # dw_partial: (programs, GROUPS * SIZE)
    # Load the weight
    group = tl.program_id(0)
    col_mask = tl.arange(0, BLOCK_N) < SIZE
    col_offsets = group * SIZE + tl.arange(0, BLOCK_N)
    w = tl.load(weight + col_offsets, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)  # rows are added once, at the end: that takes an exchange of threads
    for block in tl.range(tl.program_id(1), tl.cdiv(M, ROWS), tl.num_programs(1), num_stages=NUM_STAGES):
        # Load a block of rows of x, gate and dy
        row_idx = block * ROWS + tl.arange(0, ROWS)
        mask = (row_idx[:, None] < M) & col_mask[None, :]
        row_offsets = row_idx.to(tl.int64)[:, None]
        x_fp32 = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        g_fp32 = tl.load(gate + row_offsets * stride_g + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + row_offsets * stride_dy + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        act, slope = activate(g_fp32, SILU, PRECISE)
        # Recompute what was normalised, and rstd
        u = x_fp32
        dnorm = dy_fp32 * act  # the gradient of the norm
        if not NORM_FIRST:
            u = x_fp32 * act
            dnorm = dy_fp32
        wdy = dnorm * w
        sum_squares, sum_wdy_u = sum_pair(u * u, wdy * u, 1)
        rstd = tl.rsqrt(mean_of(sum_squares, SIZE) + eps)
        rstd = tl.where(row_idx < M, rstd, 0.0)  # a masked row is 0: its rstd is infinite if eps is 0
        mean_wdy_u_hat = mean_of(sum_wdy_u * rstd, SIZE)[:, None]
        u_hat = u * rstd[:, None]
        rounded, product = weighted(u_hat, w, x, weight, FP32_WEIGHT)
        # Compute and store dx and dgate
        du = (wdy - u_hat * mean_wdy_u_hat) * rstd[:, None]
        if NORM_FIRST:
            dx_fp32 = du
            dgate_fp32 = dy_fp32 * product * slope
        else:
            dx_fp32 = du * act
            dgate_fp32 = du * x_fp32 * slope
        out_offsets = row_offsets * GROUPS * SIZE + col_offsets[None, :]
        tl.store(dx + out_offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + out_offsets, dgate_fp32.to(dgate.dtype.element_ty), mask=mask)
        # Accumulate dw
        if NEED_DWEIGHT:
            dw += dnorm * rounded
    # Store this program's partial dw
    if NEED_DWEIGHT:
        tl.store(dw_partial + tl.program_id(1).to(tl.int64) * GROUPS * SIZE + col_offsets, tl.sum(dw, 0), mask=col_mask)


_forward = TritonKernel(_rms_norm_gated_kernel)
_backward = TritonKernel(_rms_norm_gated_backward_kernel)


def _sizes(x: Tensor, args: Args) -> tuple[int, int, int]:
    """Rows, groups of a row, and columns of a group."""
    m, n = x.shape
    size = args.group_size or n
    return m, n // size, size


def _options(args: Args) -> tuple[bool, bool, bool, bool]:
    """NORM_FIRST, FP32_WEIGHT, SILU, PRECISE."""
    return args.norm_before_gate, args.fp32_weight, args.activation == "silu", args.x.dtype == torch.float32


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=every(configure),
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor], args: RmsNormGatedArgs, config: Config) -> None:
    (y,) = outs
    x, gate, weight = as_rows(args.x), as_rows(args.gate), args.weight.contiguous()
    m, groups, size = _sizes(x, args)
    if triton.next_power_of_2(size) > MAX_BLOCK:
        long_gated_rows.launch(y, x, gate, weight, size, args.eps, _options(args))
        return
    parameters = (y, x, gate, weight, m, groups, size, x.stride(0), gate.stride(0), args.eps)
    constants = (*_options(args), config.rows, triton.next_power_of_2(size))
    _forward((triton.cdiv(m, config.rows) * groups,), parameters, constants, num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=PersistentConfig,
    configs=every(configure_backward),
    candidates=candidates_backward,
    why_not=why_not,
)
def launch_backward(
    outs: tuple[Tensor, Tensor, Tensor], args: RmsNormGatedBackwardArgs, config: PersistentConfig
) -> None:
    dx, dgate, dweight = outs
    dy, x, gate, weight = as_rows(args.dy), as_rows(args.x), as_rows(args.gate), args.weight.contiguous()
    m, groups, size = _sizes(x, args)
    in_parts = gated_parts.takes(size, x.dtype)
    if triton.next_power_of_2(size) > MAX_BLOCK_BACKWARD and not in_parts:
        gradients = dx, dgate, dweight if args.need_dweight else None
        long_gated_rows.launch_backward(gradients, dy, x, gate, weight, size, args.eps, _options(args))
        return
    most = triton.cdiv(config.ctas_per_sm * device_info(x.device).sm_count, groups)
    programs = min(triton.cdiv(m, config.rows), most)
    dw_partial = scratch((programs if args.need_dweight else 1, groups * size), torch.float32, x.device)
    strides = (dy.stride(0), x.stride(0), gate.stride(0))
    parameters = (dx, dgate, dw_partial, dy, x, gate, weight, m, groups, size, *strides, args.eps)
    if in_parts:
        packed = x.itemsize == 2 and target_of(x).startswith("sm_")
        tiles = (packed, size // gated_parts.COLUMNS, gated_parts.COLUMNS, config.num_stages)
        constants = (*_options(args), args.need_dweight, *tiles)
        gated_parts.backward((groups, programs), parameters, constants, num_warps=config.num_warps)
    else:
        constants = (*_options(args), args.need_dweight, config.rows, triton.next_power_of_2(size), config.num_stages)
        _backward((groups, programs), parameters, constants, num_warps=config.num_warps)
    if args.need_dweight:
        column_sums(dweight, dw_partial)
