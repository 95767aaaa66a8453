"""adamw in Triton: a program takes a run of elements in memory and keeps all of a step in registers.

1 - beta^step is -expm1(step * log(beta)), by its series where the difference of 1 and a power near 1 would lose digits.
Random words come by fours, for four neighbours each.

Traffic: parameter and states read and written, the gradient read: 28 bytes an element in float32, 14 with everything in
bf16: 2^30 elements cannot take less than 7.0 or 3.5 ms at 4.3 TB/s.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.optim.adamw import FORWARD, AdamwArgs, AdamwBucket
from tilewright.ops.optim.memory import has_order, is_dense, ordered_as
from tilewright.ops.rows import no_float64


class Config(NamedTuple):
    """block: elements of a program, a multiple of 4."""

    block: int
    num_warps: int


_FEW = 1 << 18  # elements of fewer blocks than an H200 has multiprocessors, twice
CONFIGS = (Config(256, 2), Config(1024, 4))
_CANDIDATES = (*CONFIGS, Config(512, 4), Config(1024, 8), Config(2048, 8))


def configure(bucket: AdamwBucket, dtype: torch.dtype) -> Config:
    """Four elements a thread, eight where there are many: not measured."""
    return CONFIGS[bucket.N >= _FEW]


def candidates(bucket: AdamwBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return _CANDIDATES


@triton.jit
def _one_minus_power(log_beta, step):
    """1 - beta^step."""
    y = step * log_beta
    series = 1.0 + y * (1.0 / 8)
    series = 1.0 + y * (1.0 / 7) * series
    series = 1.0 + y * (1.0 / 6) * series
    series = 1.0 + y * (1.0 / 5) * series
    series = 1.0 + y * (1.0 / 4) * series
    series = 1.0 + y * (1.0 / 3) * series
    series = 1.0 + y * (1.0 / 2) * series
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def _random_words(seed, stream, first, BLOCK: tl.constexpr):
    """A word for each of BLOCK elements from `first` on, a multiple of 4."""
    quad = first // 4 + tl.arange(0, BLOCK // 4)
    low = (quad & 0xFFFFFFFF).to(tl.uint32)
    high = ((quad >> 32) & 0xFFFFFFFF).to(tl.uint32)
    streams = tl.zeros((BLOCK // 4,), tl.uint32) + stream.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), low, high, streams, tl.zeros_like(streams))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@triton.jit
def _rounded(x, bits):
    """float32 x with the mantissa of bf16, rounded by sixteen random bits."""
    raised = ((x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, raised, x)


@triton.jit
def _adamw_kernel(
    new_param, new_exp_avg, new_exp_avg_sq, new_copy, param, grad, exp_avg, exp_avg_sq,  # (n,) in memory
    step_ptr, seed_ptr, rate, grad_scale, found_inf,  # ()
    lr, log_beta1, log_beta2, add1, beta2, add2, eps, weight_decay, n,  # add = 1 - beta
    MAXIMIZE: tl.constexpr, STOCHASTIC_PARAM: tl.constexpr, STOCHASTIC_STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offs = first + tl.arange(0, BLOCK)
    mask = offs < n
    old_g = tl.load(grad + offs, mask=mask, other=0.0)
    old_m = tl.load(exp_avg + offs, mask=mask, other=0.0)
    old_v = tl.load(exp_avg_sq + offs, mask=mask, other=0.0)
    old_weight = tl.load(param + offs, mask=mask, other=0.0)

    g = old_g.to(tl.float32)
    step = tl.load(step_ptr)
    if rate is not None:
        lr = tl.load(rate)
    if grad_scale is not None:
        g = tl.div_rn(g, tl.load(grad_scale))
    if MAXIMIZE:
        g = -g
    m = old_m.to(tl.float32)
    m += (g - m) * add1
    v = old_v.to(tl.float32) * beta2 + g * g * add2
    step_size = tl.div_rn(lr, _one_minus_power(log_beta1, step))
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(_one_minus_power(log_beta2, step))) + eps
    weight = old_weight.to(tl.float32)
    weight -= lr * weight_decay * weight
    weight -= tl.div_rn(step_size * m, denominator)

    if STOCHASTIC_PARAM or STOCHASTIC_STATES:
        words = _random_words(seed_ptr, 2 * step.to(tl.int64), first, BLOCK)
        if STOCHASTIC_PARAM:
            weight = _rounded(weight, words & 0xFFFF)
        if STOCHASTIC_STATES:
            m = _rounded(m, words >> 16)
            v = _rounded(v, _random_words(seed_ptr, 2 * step.to(tl.int64) + 1, first, BLOCK) & 0xFFFF)
    if found_inf is not None:
        overflow = tl.load(found_inf) != 0.0
        weight = tl.where(overflow, old_weight.to(tl.float32), weight)
        m = tl.where(overflow, old_m.to(tl.float32), m)
        v = tl.where(overflow, old_v.to(tl.float32), v)
    tl.store(new_param + offs, weight.to(new_param.dtype.element_ty), mask=mask)
    tl.store(new_exp_avg + offs, m.to(new_exp_avg.dtype.element_ty), mask=mask)
    tl.store(new_exp_avg_sq + offs, v.to(new_exp_avg_sq.dtype.element_ty), mask=mask)
    if new_copy is not None:
        tl.store(new_copy + offs, weight.to(new_copy.dtype.element_ty), mask=mask)


_kernel = TritonKernel(_adamw_kernel)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=lambda args: no_float64(*args),
)  # fmt: skip
def launch(outs: tuple[Tensor, ...], args: AdamwArgs, config: Config) -> None:
    """A parameter that is not dense is copied, and so is what has another order in memory than the parameter."""
    n, has_copy = args.param.numel(), args.copy_dtype != args.param.dtype
    order = args.param if is_dense(args.param) else args.param.contiguous()
    inputs = tuple(ordered_as(t, order) for t in (args.param, args.grad, args.exp_avg, args.exp_avg_sq))
    targets = outs if has_copy else outs[:3]
    results = tuple(t if has_order(t, order) else torch.empty_like(order, dtype=t.dtype) for t in targets)
    at_random = args.seed is not None
    stochastic = tuple(at_random and t.dtype == torch.bfloat16 for t in (args.param, args.exp_avg))
    _kernel(
        (triton.cdiv(n, config.block),),
        (
            *results, *(() if has_copy else (None,)), *inputs,
            args.step, args.seed, args.rate, args.grad_scale, args.found_inf,
            args.lr, _log(args.beta1), _log(args.beta2), 1 - args.beta1, args.beta2, 1 - args.beta2, args.eps,
            args.weight_decay, n,
        ),
        (args.maximize, *stochastic, config.block),
        num_warps=config.num_warps,
    )  # fmt: skip
    for out, result in zip(targets, results, strict=True):
        if out is not result:
            out.copy_(result)
