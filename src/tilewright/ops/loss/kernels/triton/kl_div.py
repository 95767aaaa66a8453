"""Kullback-Leibler divergence in Triton: a program has a part of a row; one more adds up the parts in a fixed order.

Of probabilities up to a half the special-function unit takes the logarithm: there its error is a rounding of the
result, near 1 it is 2^-22.  The logarithm of a library is some 25 instructions, this one is two.  A part with a larger
probability takes the library's, for all of its classes.
Backward: dx = -target * dloss, or -exp(target) * dloss; it does not read the input.

Traffic: forward 4*M*N bytes at bf16, backward 4*M*N.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.exponential import exp, log_of_normal
from tilewright.ops.loss.kernels.triton.sum_rows import sum_parts
from tilewright.ops.loss.kl_div import BACKWARD, FORWARD, KlDivArgs, KlDivBackwardArgs, divisor
from tilewright.ops.rows import RowsBucket, as_rows, no_float64

_HALF_BITS = tl.constexpr(0x3F000000)  # of 0.5; as integers without a sign, numbers below 0 and NaN are above it
_LEAST = tl.constexpr(2.0**-126)  # a smaller probability, also 0, has this one's logarithm


class Config(NamedTuple):
    block: int  # columns of a program
    num_warps: int


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    block = min(4096, triton.next_power_of_2(bucket.N))
    return Config(block, max(1, min(8, block // 512)))


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(
        Config(block, warps)
        for block in (512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8, 16)
        if block < 2 * bucket.N and 4 <= block // (32 * warps) <= 64
    )


CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(1, 1 << k), torch.bfloat16) for k in range(18)))


@triton.jit
def _kl_div_kernel(
    losses, x, target, N, parts, stride_x, stride_t,
    BLOCK: tl.constexpr, LOG_TARGET: tl.constexpr, REDUCE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The losses of one part of a row, or REDUCE: their sum.   UNIT: the GPU's logarithm is that of `log_of_normal`."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x_fp32 = tl.load(x + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    t_fp32 = tl.load(target + row * stride_t + offs, mask=mask, other=0.0).to(tl.float32)
    if LOG_TARGET:
        loss = exp(t_fp32, PRECISE) * (t_fp32 - x_fp32)
    else:
        is_small = False
        if UNIT:
            is_small = tl.max(t_fp32.to(tl.uint32, bitcast=True), 0) <= _HALF_BITS
        if is_small:
            loss = t_fp32 * (log_of_normal(tl.maximum(t_fp32, _LEAST)) - x_fp32)
        else:
            loss = tl.where(t_fp32 == 0.0, 0.0, t_fp32 * tl.log(t_fp32)) - t_fp32 * x_fp32
    if REDUCE:
        tl.store(losses + tl.program_id(0), tl.sum(tl.where(mask, loss, 0.0), 0))
    else:
        tl.store(losses + row * N + offs, loss, mask=mask)


@triton.jit
def _kl_div_gradient_kernel(
    dx, target, dloss, N, parts, stride_t, stride_dloss, divisor,
    BLOCK: tl.constexpr, LOG_TARGET: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """dx of one part of a row.   REDUCE: the gradient of the loss is one number."""
    PRECISE: tl.constexpr = target.dtype.element_ty == tl.float32
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    p = tl.load(target + row * stride_t + offs, mask=mask, other=0.0).to(tl.float32)
    if LOG_TARGET:
        p = exp(p, PRECISE)
    if REDUCE:
        value = p * -tl.div_rn(tl.load(dloss).to(tl.float32), divisor)
    else:
        value = -p * tl.load(dloss + row * stride_dloss + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + row * N + offs, value.to(dx.dtype.element_ty), mask=mask)


_losses = TritonKernel(_kl_div_kernel)
_gradient = TritonKernel(_kl_div_gradient_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args[:2]),
    batch_invariant=False,
)
def launch(outs: tuple[Tensor], args: KlDivArgs, config: Config) -> None:
    x, target = as_rows(args.input), as_rows(args.target)
    m, n = x.shape
    parts, reduce = -(-n // config.block), args.reduction != "none"
    losses = scratch((m * parts,), torch.float32, x.device) if reduce else outs[0]
    parameters = (losses, x, target, n, parts, x.stride(0), target.stride(0))
    constants = (config.block, args.log_target, reduce, target_of(x).startswith("sm_"))
    _losses((m * parts,), parameters, constants, num_warps=config.num_warps)
    if reduce:
        sum_parts(outs[0], losses, divisor(args))


@register_kernel(
    BACKWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args[:2]),
    batch_invariant=False,
)
def launch_backward(outs: tuple[Tensor], args: KlDivBackwardArgs, config: Config) -> None:
    target, reduce = as_rows(args.target), args.reduction != "none"
    dloss = args.dloss if reduce else as_rows(args.dloss)
    m, n = target.shape
    parts = -(-n // config.block)
    stride = 0 if reduce else dloss.stride(0)
    parameters = (outs[0], target, dloss, n, parts, target.stride(0), stride, float(divisor(args)))
    _gradient((m * parts,), parameters, (config.block, args.log_target, reduce), num_warps=config.num_warps)
