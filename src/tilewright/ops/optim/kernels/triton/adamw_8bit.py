"""adamw_8bit in Triton: `adamw`, whose program has whole blocks of 256 elements.  It looks codes up in the numbers that
they stand for, which it computes first, and finds the new ones by the lines of the decades.

Multiplications and additions are not fused: codes and scales have the reference's bits.

Traffic: 16 bytes an element in float32, 10 in bf16, and 16 for the scales of a block: 2^30 elements cannot take less
than 4.0 or 2.5 ms at 4.3 TB/s.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.optim.adamw_8bit import FORWARD, Adamw8bitArgs, Adamw8bitBucket
from tilewright.ops.optim.dynamic_map import BLOCK, FIRST_CELL, TINY, ZERO_BELOW
from tilewright.ops.optim.kernels.triton.adamw import _one_minus_power, _random_words, _rounded
from tilewright.ops.rows import no_float64


class Config(NamedTuple):
    """blocks: blocks of 256 elements of a program, a power of two."""

    blocks: int
    num_warps: int


_FEW = 1 << 18  # elements of fewer programs than an H200 has multiprocessors, twice
CONFIGS = (Config(2, 4), Config(4, 4))
_CANDIDATES = (*CONFIGS, Config(8, 4), Config(8, 8))
_BLOCK = tl.constexpr(BLOCK)
_FIRST_CELL, _TINY = tl.constexpr(FIRST_CELL), tl.constexpr(TINY)
_SIGNED_ZERO, _UNSIGNED_ZERO = tl.constexpr(ZERO_BELOW[True]), tl.constexpr(ZERO_BELOW[False])


def configure(bucket: Adamw8bitBucket, dtype: torch.dtype) -> Config:
    """Four elements a thread, eight where there are many: 10^9 in float32 take 6.5 ms, 7.7 by four and 8.0 by sixteen
    (H200, 2026-11).
    """
    return CONFIGS[bucket.N >= _FEW]


def candidates(bucket: Adamw8bitBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return _CANDIDATES


@triton.jit
def _numbers(OFFSET: tl.constexpr):
    """(256,) what each code stands for.   OFFSET: 0 with signs, 1 without."""
    code = tl.arange(0, 256)
    ordinal = tl.abs(code - 127) if OFFSET == 0 else code + 1
    cells = tl.full((256,), 1.0, tl.float32)
    for e in tl.static_range(1, 7 + OFFSET):
        cells = tl.where(ordinal >= 2**e, 2.0**e, cells)
    ten = tl.full((256,), 1e-6, tl.float32)
    for i in tl.static_range(1, 7):
        ten = tl.where(ordinal >= 2 ** (i + OFFSET), 10.0 ** (i - 6), ten)
    number = (tl.div_rn(0.9 * (ordinal.to(tl.float32) - cells + 0.5), cells) + 0.1) * ten
    number = tl.where(ordinal == OFFSET, 0.0, tl.where(code == 255, 1.0, number))
    return tl.where((code < 127) & (OFFSET == 0), -number, number)


@triton.jit
def _dequantised(codes, scales, offs, mask, OFFSET: tl.constexpr):
    """Codes (n,) and the averages that they stand for."""
    code = tl.load(codes + offs, mask=mask, other=127 * (1 - OFFSET))
    scale = tl.load(scales + offs // _BLOCK, mask=mask, other=0.0)
    return code, tl.gather(_numbers(OFFSET), code.to(tl.int32), 0) * scale


@triton.jit
def _each(blocks, BLOCKS: tl.constexpr):  # (BLOCKS,) -> an element for each of theirs
    return tl.reshape(tl.broadcast_to(blocks[:, None], (BLOCKS, _BLOCK)), (BLOCKS * _BLOCK,))


@triton.jit
def _quantised(x, BLOCKS: tl.constexpr, OFFSET: tl.constexpr):
    """The codes of x (BLOCKS * 256,) and the scales (BLOCKS,)."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in whose order NaN is above infinity
    scales = tl.max(tl.reshape(bits, (BLOCKS, _BLOCK)), 1).to(tl.float32, bitcast=True)
    scales = tl.where(scales < _TINY, 0.0, scales)
    inverse = tl.where(scales > 0.0, tl.div_rn(1.0, scales), 0.0)
    magnitude = tl.abs(x) * _each(inverse, BLOCKS)
    y = magnitude * (2.0**OFFSET * 1e6 / 0.9) + 2.0**OFFSET * 0.8 / 0.9
    for i in tl.static_range(1, 7):  # lines of decades, which are the lower the nearer the decade
        y = tl.minimum(y, magnitude * (2.0 ** (i + OFFSET) * 10.0 ** (6 - i) / 0.9) + 2.0 ** (i + OFFSET) * 0.8 / 0.9)
    ordinal = y.to(tl.int32)
    first = ((ordinal & (ordinal - 1)) == 0) & (ordinal > 2**OFFSET) & (y - ordinal.to(tl.float32) < _FIRST_CELL)
    ordinal = tl.where(first, ordinal - 1, ordinal)
    ordinal = tl.where(y < (_UNSIGNED_ZERO if OFFSET else _SIGNED_ZERO), OFFSET, ordinal)
    ordinal = tl.where(y >= 2.0 ** (7 + OFFSET) - 0.25, 2 ** (7 + OFFSET), ordinal)
    if OFFSET == 0:
        code = tl.where(x < 0.0, 127 - tl.minimum(ordinal, 127), 127 + ordinal)
    else:
        code = ordinal - 1
    finite = _each(scales.to(tl.int32, bitcast=True) < 0x7F800000, BLOCKS)
    return tl.where(finite, code, 255).to(tl.uint8), scales


@triton.jit
def _adamw_8bit_kernel(
    new_param, new_exp_avg, new_scale, new_exp_avg_sq, new_scale_sq, new_copy,  # (n,) in memory, scales (n / 256,)
    param, grad, exp_avg, scale, exp_avg_sq, scale_sq,
    step_ptr, seed_ptr, rate, grad_scale, found_inf,  # ()
    lr, log_beta1, log_beta2, add1, beta2, add2, eps, weight_decay, n,  # add = 1 - beta
    MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = BLOCKS * _BLOCK
    first = tl.program_id(0).to(tl.int64) * SIZE
    offs = first + tl.arange(0, SIZE)
    mask = offs < n
    old_weight = tl.load(param + offs, mask=mask, other=0.0)
    g = tl.load(grad + offs, mask=mask, other=0.0).to(tl.float32)
    old_m, m = _dequantised(exp_avg, scale, offs, mask, 0)
    old_v, v = _dequantised(exp_avg_sq, scale_sq, offs, mask, 1)

    step = tl.load(step_ptr)
    if rate is not None:
        lr = tl.load(rate)
    if grad_scale is not None:
        g = tl.div_rn(g, tl.load(grad_scale))
    if MAXIMIZE:
        g = -g
    m += (g - m) * add1
    v = v * beta2 + g * g * add2
    step_size = tl.div_rn(lr, _one_minus_power(log_beta1, step))
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(_one_minus_power(log_beta2, step))) + eps
    weight = old_weight.to(tl.float32)
    weight -= lr * weight_decay * weight
    weight -= tl.div_rn(step_size * m, denominator)
    if STOCHASTIC:
        weight = _rounded(weight, _random_words(seed_ptr, 2 * step.to(tl.int64), first, SIZE) & 0xFFFF)

    codes, scales = _quantised(m, BLOCKS, 0)
    codes_sq, scales_sq = _quantised(v, BLOCKS, 1)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    has_elements = block * _BLOCK < n
    if found_inf is not None:
        overflow = tl.load(found_inf) != 0.0
        weight = tl.where(overflow, old_weight.to(tl.float32), weight)
        codes = tl.where(overflow, old_m, codes)
        codes_sq = tl.where(overflow, old_v, codes_sq)
        scales = tl.where(overflow, tl.load(scale + block, mask=has_elements, other=0.0), scales)
        scales_sq = tl.where(overflow, tl.load(scale_sq + block, mask=has_elements, other=0.0), scales_sq)
    tl.store(new_param + offs, weight.to(new_param.dtype.element_ty), mask=mask)
    tl.store(new_exp_avg + offs, codes, mask=mask)
    tl.store(new_exp_avg_sq + offs, codes_sq, mask=mask)
    tl.store(new_scale + block, scales, mask=has_elements)
    tl.store(new_scale_sq + block, scales_sq, mask=has_elements)
    if new_copy is not None:
        tl.store(new_copy + offs, weight.to(new_copy.dtype.element_ty), mask=mask)


_kernel = TritonKernel(_adamw_8bit_kernel, enable_fp_fusion=False)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=lambda args: no_float64(*args),
)  # fmt: skip
def launch(outs: tuple[Tensor, ...], args: Adamw8bitArgs, config: Config) -> None:
    """What is not contiguous is copied."""
    n, has_copy = args.param.numel(), args.copy_dtype != args.param.dtype
    inputs = [t.contiguous() for t in args[:6]]
    targets = outs if has_copy else outs[:5]
    results = [torch.empty(t.shape, dtype=t.dtype, device=t.device) if not t.is_contiguous() else t for t in targets]
    _kernel(
        (triton.cdiv(n, config.blocks * BLOCK),),
        (
            *results, *(() if has_copy else (None,)), *inputs,
            args.step, args.seed, args.rate, args.grad_scale, args.found_inf,
            args.lr, _log(args.beta1), _log(args.beta2), 1 - args.beta1, args.beta2, 1 - args.beta2, args.eps,
            args.weight_decay, n,
        ),
        (args.maximize, args.seed is not None and args.param.dtype == torch.bfloat16, config.blocks),
        num_warps=config.num_warps,
    )  # fmt: skip
    for out, result in zip(targets, results, strict=True):
        if out is not result:
            out.copy_(result)
