"""Backward of RMSNorm with a gate in Triton, long groups.  A program holds a group of a row in registers, in parts.

A group is several tiles of COLUMNS, so that no lane lies beyond it: 5120 columns are five tiles of 1024, where a power
of two would be 8192.  Between its two uses an element of 16 bits stays packed, and the gate is computed twice: in
float32 a row would not fit beside the weight and the sums of its gradient.  Formulas, names and traffic:
`rms_norm_gated.py`.
"""

import torch
import triton
import triton.language as tl

from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton.column_sums import mean_of
from tilewright.ops.norm.kernels.triton.gate import activate, weighted
from tilewright.ops.norm.kernels.triton.moments import sum_pair
from tilewright.ops.norm.kernels.triton.row_blocks import PersistentConfig
from tilewright.ops.opaque import opaque_fp32
from tilewright.ops.rows import RowsBucket

COLUMNS = 1024
_LEAST, _MOST, _MOST_FP32 = 3, 7, 5  # parts; eight spill on sm_90, six of float32 too


def takes(size: int, dtype: torch.dtype) -> bool:
    """Whether groups of `size` columns are held in parts."""
    return size % COLUMNS == 0 and _LEAST <= size // COLUMNS <= (_MOST if dtype.itemsize == 2 else _MOST_FP32)


def configure(bucket: RowsBucket, dtype: torch.dtype) -> PersistentConfig:
    """16 warps an SM, and a row of each program in flight."""
    if dtype.itemsize > 2:
        return PersistentConfig(rows=1, num_warps=8, num_stages=2, ctas_per_sm=1)
    num_warps = 8 if bucket.N <= 5 * COLUMNS else 16
    return PersistentConfig(rows=1, num_warps=num_warps, num_stages=2, ctas_per_sm=16 // num_warps)


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[PersistentConfig, ...]:
    return tuple(
        PersistentConfig(1, warps, stages, ctas_per_sm)
        for warps, ctas_per_sm in ((4, 2), (8, 1), (8, 2), (16, 1))
        for stages in (1, 2, 3)
    )


@triton.jit
def _gated(x, g, dy, NORM_FIRST: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr):
    """What was normalised, the gradient of its norm, act(gate), act'(gate)."""
    act, slope = activate(g, SILU, PRECISE)
    if NORM_FIRST:
        u, dnorm = x, dy * act
    else:
        u, dnorm = x * act, dy
    return u, dnorm, act, slope


@triton.jit
def _gated_backward_parts_kernel(
    dx, dgate, dw_partial, dy, x, gate, weight, M, GROUPS, SIZE, stride_dy, stride_x, stride_g, eps,
    NORM_FIRST: tl.constexpr, FP32_WEIGHT: tl.constexpr, SILU: tl.constexpr, PRECISE: tl.constexpr,
    NEED_DWEIGHT: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip  # dw_partial: (programs, GROUPS * SIZE)   SIZE = PARTS * COLUMNS
    PACKED_DY: tl.constexpr = PACKED and dy.dtype.element_ty == x.dtype.element_ty
    offs = tl.program_id(0) * SIZE + tl.arange(0, COLUMNS)
    w = ()
    dw = ()
    for part in tl.static_range(PARTS):
        w += (tl.load(weight + offs + part * COLUMNS).to(tl.float32),)
        dw += (tl.zeros((COLUMNS,), tl.float32),)
    for row in tl.range(tl.program_id(1), M, tl.num_programs(1), num_stages=NUM_STAGES):
        row_idx = tl.cast(row, tl.int64)
        # Load a row, and sum u^2 and wdy * u
        x_row = ()
        g_row = ()
        dy_row = ()
        squares = tl.zeros((COLUMNS,), tl.float32)
        products = tl.zeros((COLUMNS,), tl.float32)
        for part in tl.static_range(PARTS):
            x_row += (tl.load(x + row_idx * stride_x + offs + part * COLUMNS),)
            g_row += (tl.load(gate + row_idx * stride_g + offs + part * COLUMNS),)
            dy_row += (tl.load(dy + row_idx * stride_dy + offs + part * COLUMNS),)
        for part in tl.static_range(PARTS):
            u, dnorm, _, _ = _gated(
                x_row[part].to(tl.float32), g_row[part].to(tl.float32), dy_row[part].to(tl.float32),
                NORM_FIRST, SILU, PRECISE,
            )  # fmt: skip
            squares += u * u
            products += dnorm * w[part] * u
        sum_squares, sum_wdy_u = sum_pair(squares, products, 0)
        rstd = tl.rsqrt(mean_of(sum_squares, SIZE) + eps)
        mean_wdy_u_hat = mean_of(sum_wdy_u * rstd, SIZE)
        # Compute and store dx and dgate, and accumulate dw
        dw_next = ()
        for part in tl.static_range(PARTS):
            x_fp32, dy_fp32 = opaque_fp32(x_row[part], PACKED), opaque_fp32(dy_row[part], PACKED_DY)
            u, dnorm, act, slope = _gated(x_fp32, opaque_fp32(g_row[part], PACKED), dy_fp32, NORM_FIRST, SILU, PRECISE)
            u_hat = u * rstd
            rounded, product = weighted(u_hat, w[part], x, weight, FP32_WEIGHT)
            du = (dnorm * w[part] - u_hat * mean_wdy_u_hat) * rstd
            if NORM_FIRST:
                dx_fp32 = du
                dgate_fp32 = dy_fp32 * product * slope
            else:
                dx_fp32 = du * act
                dgate_fp32 = du * x_fp32 * slope
            out_offsets = row_idx * GROUPS * SIZE + offs + part * COLUMNS
            tl.store(dx + out_offsets, dx_fp32.to(dx.dtype.element_ty))
            tl.store(dgate + out_offsets, dgate_fp32.to(dgate.dtype.element_ty))
            dw_next += (dw[part] + dnorm * rounded,)
        dw = dw_next
    if NEED_DWEIGHT:
        for part in tl.static_range(PARTS):
            tl.store(dw_partial + tl.program_id(1).to(tl.int64) * GROUPS * SIZE + offs + part * COLUMNS, dw[part])


backward = TritonKernel(_gated_backward_parts_kernel)
