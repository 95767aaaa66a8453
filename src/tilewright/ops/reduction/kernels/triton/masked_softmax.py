"""Masked softmax in Triton: one program a row.  A row of one tile is read once; of a longer one, the second of two
passes finds what is left of the first in L1 or L2.

Keys after the diagonal are not read.  The mask is read where it lies, by its strides over x's shape.
Backward: dx = y * (dy - dot(dy, y) / sum(y)) / temperature; y is 0 where a key is invisible, so it needs no mask.  The
sum is 1 but for the rounding of y, and with it a constant dy has gradient 0.

Traffic: 4*Q*K bytes a matrix forward at bf16, and the mask; backward 6*Q*K.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import exp
from tilewright.ops.reduction.kernels.triton.packed_rows import LOWEST
from tilewright.ops.reduction.masked_softmax import BACKWARD, FORWARD, MaskedSoftmaxArgs, MaskedSoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows, no_float64

TILE = 4096  # elements of a row that a program holds


class Config(NamedTuple):
    block: int  # columns of a tile
    num_warps: int


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    block = min(TILE, triton.next_power_of_2(bucket.N))
    return Config(block, num_warps=max(1, min(8, block // 512)))


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(
        Config(block, warps)
        for block in (256, 512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8, 16)
        if block < 2 * max(256, bucket.N) and 4 <= block // (32 * warps) <= 64
    )


CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(4096, 1 << k), torch.bfloat16) for k in range(14)))


@triton.jit
def _scores(x, mask, cols, end, temperature, stride_k, MASK: tl.constexpr, TEMPERED: tl.constexpr):
    """x / temperature + mask of a tile, -inf where a key is invisible."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    visible = cols < end
    s = tl.load(x + cols, mask=visible, other=float("-inf")).to(tl.float32)
    if TEMPERED:
        if PRECISE:
            s = tl.div_rn(s, temperature + tl.zeros_like(s))
        else:
            s = s * (1.0 / temperature)
    if MASK == "keep":
        keep = tl.load(mask + cols.to(tl.int64) * stride_k, mask=visible, other=0)
        s = tl.where(keep != 0, s, float("-inf"))
    if MASK == "add":
        s += tl.load(mask + cols.to(tl.int64) * stride_k, mask=visible, other=0.0).to(tl.float32)
    return s


@triton.jit
def _inverse(l_i):
    """1 / l_i; 0 for a row without a visible key."""
    return tl.where(l_i == 0.0, 0.0, tl.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i)))


@triton.jit
def _masked_softmax_kernel(
    y, x, mask, H, Q, K, temperature, stride_x,
    stride_b, stride_h, stride_q, stride_k,  # of the mask, (B, H, Q, K)
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """y of a row.  WHOLE: the row is one tile."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    q, matrix = row % Q, row // Q
    mask += matrix // H * stride_b + matrix % H * stride_h + q * stride_q
    x += row * stride_x
    y += row * K
    end = K
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(K, q + 1 + K - Q)).to(tl.int32)
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        s = _scores(x, mask, cols, end, temperature, stride_k, MASK, TEMPERED)
        e = exp(s - tl.maximum(tl.max(s, 0), LOWEST), PRECISE)
        tl.store(y + cols, (e * _inverse(tl.sum(e, 0))).to(y.dtype.element_ty), mask=cols < K)
    else:
        # First pass: running maximum and sum in every lane
        m_i = tl.full((BLOCK,), LOWEST, tl.float32)
        l_i = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, end, BLOCK):
            s = _scores(x, mask, start + cols, end, temperature, stride_k, MASK, TEMPERED)
            m_new = tl.maximum(m_i, s)
            l_i = l_i * exp(m_i - m_new, PRECISE) + exp(s - m_new, PRECISE)
            m_i = m_new
        row_max = tl.max(m_i, 0)
        scale = _inverse(tl.sum(l_i * exp(m_i - row_max, PRECISE), 0))
        # Second pass: scale and store
        for start in tl.range(0, K, BLOCK):
            s = _scores(x, mask, start + cols, end, temperature, stride_k, MASK, TEMPERED)
            y_fp32 = exp(s - row_max, PRECISE) * scale
            tl.store(y + start + cols, y_fp32.to(y.dtype.element_ty), mask=start + cols < K)


@triton.jit
def _masked_softmax_backward_kernel(
    dx, dy, y, K, temperature, stride_dy, stride_y,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx of a row.  WHOLE: the row is one tile."""
    row = tl.program_id(0).to(tl.int64)
    dx += row * K
    dy += row * stride_dy
    y += row * stride_y
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        y_fp32 = tl.load(y + cols, mask=cols < K, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + cols, mask=cols < K, other=0.0).to(tl.float32)
        mean = tl.sum(y_fp32 * dy_fp32, 0) * _inverse(tl.sum(y_fp32, 0))
        dx_fp32 = y_fp32 * (dy_fp32 - mean) * (1.0 / temperature)
        tl.store(dx + cols, dx_fp32.to(dx.dtype.element_ty), mask=cols < K)
    else:
        dots = tl.zeros((BLOCK,), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, K, BLOCK):
            y_fp32 = tl.load(y + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)
            dots += y_fp32 * tl.load(dy + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)
            sums += y_fp32
        mean = tl.sum(dots, 0) * _inverse(tl.sum(sums, 0))
        for start in tl.range(0, K, BLOCK):
            y_fp32 = tl.load(y + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)
            dy_fp32 = tl.load(dy + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)
            dx_fp32 = y_fp32 * (dy_fp32 - mean) * (1.0 / temperature)
            tl.store(dx + start + cols, dx_fp32.to(dx.dtype.element_ty), mask=start + cols < K)


_forward = TritonKernel(_masked_softmax_kernel)
_backward = TritonKernel(_masked_softmax_backward_kernel)


def _mask_of(args: MaskedSoftmaxArgs) -> tuple[Tensor, str, int, tuple[int, ...]]:
    """The mask, what a kernel does with it, H, and its strides over x as (B, H, Q, K), with x's last leading dimension
    as H.
    """
    if args.mask is None:
        return args.x, "", 1, (0, 0, 0, 0)
    *leading, q, k = args.x.shape
    h = leading[-1] if leading else 1
    mask = args.mask.expand(args.x.shape).reshape(-1, h, q, k)
    kind = "keep" if mask.dtype == torch.bool else "add"
    return mask.view(torch.uint8) if kind == "keep" else mask, kind, h, mask.stride()


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(args.x, args.mask),
)
def launch(outs: tuple[Tensor], args: MaskedSoftmaxArgs, config: Config) -> None:
    x = as_rows(args.x)
    m, k = x.shape
    mask, kind, h, strides = _mask_of(args)
    parameters = (outs[0], x, mask, h, args.x.shape[-2], k, args.temperature, x.stride(0), *strides)
    constants = (config.block, k <= config.block, args.causal, kind, args.temperature != 1.0)
    _forward((m,), parameters, constants, num_warps=config.num_warps)


@register_kernel(BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch_backward(outs: tuple[Tensor], args: MaskedSoftmaxBackwardArgs, config: Config) -> None:
    dy, y = as_rows(args.dy), as_rows(args.y)
    m, k = y.shape
    parameters = (outs[0], dy, y, k, args.temperature, dy.stride(0), y.stride(0))
    _backward((m,), parameters, (config.block, k <= config.block), num_warps=config.num_warps)
