"""Jensen-Shannon divergence and total variation in Triton: a program has a row of the student and one of the teacher.

A row that fits in registers is read once.  For a longer one every lane keeps a running maximum and sum of both rows,
and a second pass adds up the divergence.  The mixture m needs no sum of its own: with d = log q - log p, log m - log p
is log(beta + (1 - beta) * e^d), or from the side of q where d is above 0, so that e^d never overflows.
Backward: dx = (g - q * sum(g)) / temperature, g the gradient of log q; a program has a part of a row.

Traffic: forward 4*M*V bytes at bf16, and as many for the second pass of long rows; backward 6*M*V.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import exp, log, log_by_polynomial
from tilewright.ops.loss.divergence import Options
from tilewright.ops.loss.jsd import BACKWARD, FORWARD, JsdArgs, JsdBackwardArgs, options_of
from tilewright.ops.loss.kernels.triton.sum_rows import sum_rows
from tilewright.ops.reduction.kernels.triton.packed_rows import LOWEST
from tilewright.ops.rows import RowsBucket, as_rows, no_float64

_HELD = 4096  # columns of a row that is read once


class Config(NamedTuple):
    block: int  # columns of one step; all of a row where it is read once
    num_warps: int


def _of_columns(block: int) -> Config:
    return Config(block, max(1, min(8, block // 256)))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    if bucket.N <= _HELD:
        return _of_columns(triton.next_power_of_2(bucket.N))
    # Eight columns a thread of a long row spill on sm_100.  H200, 2026-11, bf16, beta 0.5, with 8, 16 and 32 warps:
    # 27 x 32000 36.2, 24.4, 20.6 us; 1024 x 131072 503, 468, 523; AMD's GPUs have no block of 32 wavefronts
    return Config(2048, 16)


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    return _of_columns(min(1024, triton.next_power_of_2(bucket.N)))


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(
        Config(block, warps)
        for block in (512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8, 16)
        if block < 2 * bucket.N and 4 <= block // (32 * warps) <= 32
    )


_WIDTHS = tuple(1 << k for k in range(18))
CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(1, n), torch.bfloat16) for n in _WIDTHS))
BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward(RowsBucket(1, n), torch.bfloat16) for n in _WIDTHS))


@triton.jit
def _divergence(q_log, p_log, mask, beta, KIND: tl.constexpr, LOG_PROBS: tl.constexpr, PRECISE: tl.constexpr):
    """Terms of the divergence of some classes, q, and the gradient of log q, without what a softmax cancels."""
    has_q, has_p = q_log != float("-inf"), p_log != float("-inf")
    d = tl.where(has_q | has_p, q_log - p_log, 0.0)
    is_teacher = d <= 0.0
    ratio = exp(tl.where(is_teacher, d, -d), PRECISE)  # of the smaller one of q and p to the larger one
    if PRECISE or KIND != "mixture":
        q, p = exp(q_log, PRECISE), exp(p_log, PRECISE)
    else:
        larger = exp(tl.maximum(q_log, p_log), PRECISE)
        q, p = tl.where(is_teacher, larger * ratio, larger), tl.where(is_teacher, larger, larger * ratio)
    if KIND == "tvd":
        term = 0.5 * tl.abs(q - p)
        gradient = q * tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, 0.0))
    elif KIND == "forward":
        term = tl.where(has_p, -d, 0.0) * p
        gradient = -p
    elif KIND == "reverse":
        term = tl.where(has_q, d, 0.0) * q
        gradient = term
        if LOG_PROBS:
            gradient += q
    else:
        weight = tl.where(is_teacher, beta, 1.0 - beta)
        mixture = log_by_polynomial(weight + (1.0 - weight) * ratio)
        of_p = tl.where(has_p, mixture + tl.where(is_teacher, 0.0, d), 0.0)
        of_q = tl.where(has_q, mixture - tl.where(is_teacher, d, 0.0), 0.0)
        gradient = (beta - 1.0) * q * of_q
        term = gradient - beta * p * of_p
    return tl.where(mask, term, 0.0), q, tl.where(mask, gradient, 0.0)


@triton.jit
def _absorb(m_i, l_i, part, PRECISE: tl.constexpr):
    """Add a step to the running maximum and sum of exponentials of every lane.  One of the two is the new maximum."""
    is_larger = part > m_i
    e = exp(tl.where(is_larger, m_i - part, part - m_i), PRECISE)
    return tl.maximum(m_i, part), tl.where(is_larger, l_i * e + 1.0, l_i + e)


@triton.jit
def _jsd_kernel(
    loss, statistics, student, teacher, target, N, stride_s, stride_t, ignore_index, per_temperature, beta,
    BLOCK: tl.constexpr, HELD: tl.constexpr, KIND: tl.constexpr, LOG_PROBS: tl.constexpr, HAS_TARGET: tl.constexpr,
):  # fmt: skip
    """Divergence and statistics of each row.   HELD: a row is one step."""
    PRECISE: tl.constexpr = student.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    end = N
    if HAS_TARGET:
        end = tl.where(tl.load(target + row).to(tl.int64) == ignore_index, 0, N)  # nothing of an ignored row is read
    student += row * stride_s
    teacher += row * stride_t
    offs = tl.arange(0, BLOCK)
    mask_held = offs < end
    if HELD:
        s_held = tl.load(student + offs, mask=mask_held, other=float("-inf")).to(tl.float32) * per_temperature
        t_held = tl.load(teacher + offs, mask=mask_held, other=float("-inf")).to(tl.float32) * per_temperature
    # First pass: maxima and sums, which log-probabilities do not need
    m_s, m_t, log_s, log_t = 0.0, 0.0, 0.0, 0.0
    if not LOG_PROBS:
        ms_i = tl.full((BLOCK,), LOWEST, tl.float32)
        mt_i = tl.full((BLOCK,), LOWEST, tl.float32)
        ls_i = tl.zeros((BLOCK,), tl.float32)
        lt_i = tl.zeros((BLOCK,), tl.float32)
        if HELD:
            ms_i, ls_i = _absorb(ms_i, ls_i, s_held, PRECISE)
            mt_i, lt_i = _absorb(mt_i, lt_i, t_held, PRECISE)
        else:
            for first in range(0, end, BLOCK):
                mask = offs < end - first
                s = tl.load(student + first + offs, mask=mask, other=float("-inf")).to(tl.float32) * per_temperature
                t = tl.load(teacher + first + offs, mask=mask, other=float("-inf")).to(tl.float32) * per_temperature
                ms_i, ls_i = _absorb(ms_i, ls_i, s, PRECISE)
                mt_i, lt_i = _absorb(mt_i, lt_i, t, PRECISE)
        m_s, m_t = tl.max(ms_i, 0), tl.max(mt_i, 0)
        log_s = log(tl.sum(ls_i * exp(ms_i - m_s, PRECISE), 0))
        log_t = log(tl.sum(lt_i * exp(mt_i - m_t, PRECISE), 0))
    # Second pass: the divergence
    if HELD:
        term_i, _, g_i = _divergence(
            (s_held - m_s) - log_s, (t_held - m_t) - log_t, mask_held, beta, KIND, LOG_PROBS, PRECISE
        )
    else:
        term_i = tl.zeros((BLOCK,), tl.float32)
        g_i = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, end, BLOCK):
            mask = offs < end - first
            s = tl.load(student + first + offs, mask=mask, other=float("-inf")).to(tl.float32) * per_temperature
            t = tl.load(teacher + first + offs, mask=mask, other=float("-inf")).to(tl.float32) * per_temperature
            term, _, g = _divergence((s - m_s) - log_s, (t - m_t) - log_t, mask, beta, KIND, LOG_PROBS, PRECISE)
            term_i += term
            g_i += g
    # Zeros for an ignored row, whose sums are empty
    is_row = end > 0
    tl.store(loss + row, tl.sum(term_i, 0))
    statistics += row * 5
    tl.store(statistics, tl.where(is_row, m_s, 0.0))
    tl.store(statistics + 1, tl.where(is_row, log_s, 0.0))
    tl.store(statistics + 2, tl.where(is_row, m_t, 0.0))
    tl.store(statistics + 3, tl.where(is_row, log_t, 0.0))
    tl.store(statistics + 4, tl.sum(g_i, 0))


@triton.jit
def _jsd_gradient_kernel(
    dx, student, teacher, target, statistics, count, dloss, N, parts, stride_dx, stride_s, stride_t, ignore_index,
    per_temperature, beta, per_class,
    BLOCK: tl.constexpr, KIND: tl.constexpr, LOG_PROBS: tl.constexpr, HAS_TARGET: tl.constexpr, MEAN: tl.constexpr,
    VECTOR_DLOSS: tl.constexpr,
):  # fmt: skip
    """dx of one part of a row; dx may be the student itself."""
    PRECISE: tl.constexpr = student.dtype.element_ty == tl.float32
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    end = N
    if HAS_TARGET:
        end = tl.where(tl.load(target + row).to(tl.int64) == ignore_index, 0, N)
    is_read = offs < end
    s = tl.load(student + row * stride_s + offs, mask=is_read, other=0.0).to(tl.float32) * per_temperature
    t = tl.load(teacher + row * stride_t + offs, mask=is_read, other=0.0).to(tl.float32) * per_temperature
    statistics += row * 5
    q_log = (s - tl.load(statistics)) - tl.load(statistics + 1)
    p_log = (t - tl.load(statistics + 2)) - tl.load(statistics + 3)
    _, q, g = _divergence(q_log, p_log, is_read, beta, KIND, LOG_PROBS, PRECISE)
    if not LOG_PROBS:
        g -= q * tl.load(statistics + 4)
    scale = tl.load(dloss + row) if VECTOR_DLOSS else tl.load(dloss)
    scale = scale.to(tl.float32) * per_class
    if MEAN:
        scale = tl.div_rn(scale, tl.load(count))
    value = tl.where(is_read, g * (scale * per_temperature), 0.0)
    tl.store(dx + row * stride_dx + offs, value.to(dx.dtype.element_ty), mask=mask)


_rows = TritonKernel(_jsd_kernel)
_gradient = TritonKernel(_jsd_gradient_kernel)


def _kind(options: Options) -> str:
    return "tvd" if options.kind == "tvd" else {0: "forward", 1: "reverse"}.get(options.beta, "mixture")


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args[:2]),
    batch_invariant=False,
)
def launch(outs: tuple[Tensor, ...], args: JsdArgs, config: Config) -> None:
    loss, statistics, count = outs
    student, teacher, options = as_rows(args.student), as_rows(args.teacher), options_of(args)
    target = None if args.target is None else args.target.contiguous()
    m, n = student.shape
    reduced = options.reduction != "none"
    losses = scratch((m,), torch.float32, student.device) if reduced else loss
    parameters = (
        losses, statistics, student, teacher, count if target is None else target, n, student.stride(0),
        teacher.stride(0), options.ignore_index, 1 / options.temperature, options.beta,
    )  # fmt: skip
    constants = (config.block, n <= config.block, _kind(options), options.log_probs, target is not None)
    _rows((m,), parameters, constants, num_warps=config.num_warps)
    sum_rows(loss, count, losses, target, n, options.ignore_index, options.reduction)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args[:6]),
    batch_invariant=False,
)
def launch_backward(outs: tuple[Tensor], args: JsdBackwardArgs, config: Config) -> None:
    (dx,) = outs
    student, teacher, options = as_rows(args.student), as_rows(args.teacher), options_of(args)
    target, dloss = None if args.target is None else args.target.contiguous(), args.dloss.contiguous()
    count = args.row_count
    m, n = student.shape
    parts = -(-n // config.block)
    parameters = (
        dx, student, teacher, count if target is None else target, args.statistics.contiguous(), count, dloss,
        n, parts, dx.stride(0), student.stride(0), teacher.stride(0), options.ignore_index,
        1 / options.temperature, options.beta, 1 / n if options.reduction == "mean" else 1.0,
    )  # fmt: skip
    is_mean = options.reduction in ("mean", "batchmean")
    constants = (
        config.block, _kind(options), options.log_probs, target is not None, is_mean, options.reduction == "none"
    )  # fmt: skip
    _gradient((m * parts,), parameters, constants, num_warps=config.num_warps)
