"""One step of AdamW for one parameter."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, RawOp, Sample, call, dispatch, register
from tilewright.dispatch.bucket import row_bucket
from tilewright.dispatch.raw import OutputSpec
from tilewright.dispatch.targets import several
from tilewright.ops import rows
from tilewright.ops.optim import adamw_samples
from tilewright.ops.optim.adamw_checks import (
    check_no_derivative,
    check_numbers,
    check_parameter,
    check_scalar,
    check_states,
)
from tilewright.ops.optim.adamw_step import numbers_of, stepped_weight
from tilewright.ops.optim.memory import is_dense
from tilewright.ops.optim.rounding import random_words, round_stochastically

OP = "adamw"


class AdamwArgs(NamedTuple):
    """The learning rate is the tensor `rate`, or else the number `lr`; copy_dtype is param's where there is no copy."""

    param: Tensor  # any shape
    grad: Tensor  # param's shape
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor  # ()
    seed: Tensor | None  # () int64
    rate: Tensor | None  # ()
    grad_scale: Tensor | None  # ()
    found_inf: Tensor | None  # ()
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    copy_dtype: torch.dtype


class AdamwBucket(NamedTuple):
    N: int  # elements, rounded up to a power of two


@dispatch(OP)
def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: Tensor | float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    copy_dtype: torch.dtype | None = None,
    seed: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: tuple[Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  p = (1 - lr weight_decay) p - lr m' / (sqrt(v') +
    eps) with m' = m / (1 - beta1^step) and so v', all in float32.  Returns the new p, m and v, and p's copy if any.

    param p:    bf16|fp16|fp32 of any shape.   grad g: the same, or copy_dtype; minus g with `maximize`, and divided by
                grad_scale.
    exp_avg m, exp_avg_sq v: float32 or bf16, of param's shape.   step: () float32, 1 in the first step.
    lr:         a number, or a tensor () float32.   betas: in [0, 1).
    copy_dtype: bf16 or fp16, of a float32 param, which is the master of a parameter of that dtype: p rounded to it is
                returned too.
    seed:       () int64.  p, m and v in bf16 are rounded up or down at random, right in the mean, by the bits of Philox
                for (seed, step, place of the element in memory).  None: to the nearest, as the copy is always.
    grad_scale, found_inf: () float32, as `torch.amp.GradScaler` has them; where found_inf is not 0 all stay the same.
    out:        a tensor for each that is returned, usually param, exp_avg and exp_avg_sq themselves: then the step is
                in place.  Each fills one run of memory, in any order of its dimensions; results have param's.

    Scalar tensors are on param's device and read there: nothing is read on the host, and a CUDA graph serves all steps.
    A number `lr` belongs to the signature of a call; a schedule costs less with a tensor.  One launch a parameter:
    a call is made of tensors, not of lists of them.  There is no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, shapes and devices, numbers out of range, and tensors that require a gradient.
    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; Zamirai et al., "Revisiting BFloat16
    Training", 2020 (stochastic rounding).
    """
    tensors = (param, grad, exp_avg, exp_avg_sq, step, seed, grad_scale, found_inf)
    args = _raw_arguments(tensors, lr, betas, eps, weight_decay, maximize, copy_dtype)
    count = 3 if copy_dtype is None else 4
    results: tuple[Tensor, ...] = call(CONTRACT, args, backend, several(out, count, 4))
    return results[:count]


def _raw_arguments(tensors: tuple[Any, ...], lr: Tensor | float, betas: Any, *numbers: Any) -> AdamwArgs:
    """The arguments of the raw op.   tensors: all of them but the learning rate.   numbers: what follows betas."""
    param, grad, exp_avg, exp_avg_sq, step, seed, grad_scale, found_inf = tensors
    eps, weight_decay, maximize, copy_dtype = numbers
    rate, (number, beta1, beta2) = numbers_of(OP, param, lr, betas)
    return AdamwArgs(
        param, grad, exp_avg, exp_avg_sq, step, seed, rate, grad_scale, found_inf,
        number, beta1, beta2, eps, weight_decay, maximize, copy_dtype or param.dtype,
    )  # fmt: skip


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: Tensor | float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    copy_dtype: torch.dtype | None = None,
    seed: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Plain torch, in float32; on float64 nothing is rounded, whatever `copy_dtype` says."""
    tensors = (param, grad, exp_avg, exp_avg_sq, step, seed, grad_scale, found_inf)
    results = _stepped(_raw_arguments(tensors, lr, betas, eps, weight_decay, maximize, copy_dtype))
    return results[: 3 if copy_dtype is None else 4]


def _stepped(args: AdamwArgs) -> tuple[Tensor, ...]:
    kind = rows.accumulate_dtype(args.param.dtype)
    m, v, g = (t.to(kind) for t in (args.exp_avg, args.exp_avg_sq, args.grad))
    g = g if args.grad_scale is None else g / args.grad_scale.to(kind).view(())
    g = -g if args.maximize else g
    m = m + (g - m) * (1 - args.beta1)
    v = v * args.beta2 + g * g * (1 - args.beta2)
    weight = stepped_weight(args, m, v)
    results = (
        _stored(args, args.param, weight, stream=0, shift=0),
        _stored(args, args.exp_avg, m, stream=0, shift=16),
        _stored(args, args.exp_avg_sq, v, stream=1, shift=0),
    )
    if args.copy_dtype == args.param.dtype:
        return (*results, weight.new_empty(0, dtype=args.copy_dtype))
    return (*results, results[0].to(args.param.dtype if args.param.dtype == torch.float64 else args.copy_dtype))


def _stored(args: AdamwArgs, old: Tensor, value: Tensor, *, stream: int, shift: int) -> Tensor:
    """`value` in the dtype of `old`, rounded at random by 16 bits of the stream's words; `old` after an overflow."""
    if args.seed is not None and old.dtype == torch.bfloat16:
        words = random_words(args.param, args.seed, 2 * args.step.to(torch.int64) + stream)
        value = round_stochastically(value, (words >> shift) & 0xFFFF)
    value = value.to(old.dtype)
    return value if args.found_inf is None else torch.where(args.found_inf.view(()) != 0, old, value)


def _outputs(args: AdamwArgs) -> tuple[OutputSpec, ...]:
    param = args.param
    strides = param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()
    dtypes = (param.dtype, args.exp_avg.dtype, args.exp_avg_sq.dtype)
    same: tuple[OutputSpec, ...] = tuple((param.shape, dtype, strides) for dtype in dtypes)
    if args.copy_dtype == param.dtype:
        return (*same, ((0,), param.dtype))
    return (*same, (param.shape, param.dtype if param.dtype == torch.float64 else args.copy_dtype, strides))


FORWARD = RawOp(
    OP,
    "fwd",
    AdamwArgs,
    package="tilewright.ops.optim",
    kernels=("triton.adamw",),
    outputs=_outputs,
    reference=_stepped,
    bucket=lambda args: AdamwBucket(row_bucket(args.param.numel())),
    bucket_names=AdamwBucket._fields,
    batch_fields=(),
    count=4,
    out=True,
    refuses_out=lambda out, args: None if is_dense(out) else "one run of memory, in any order of the dimensions",
)


def check(args: AdamwArgs) -> None:
    """Raise InputError for what the docstring of `adamw` excludes."""
    check_numbers(OP, args.lr, args.beta1, args.beta2, args.eps, args.weight_decay)
    check_parameter(OP, args.param, args.grad, args.copy_dtype, exp_avg=args.exp_avg, exp_avg_sq=args.exp_avg_sq)
    check_states(OP, args.exp_avg, args.exp_avg_sq)
    for name in ("step", "lr", "grad_scale", "found_inf"):
        check_scalar(OP, name, getattr(args, "rate" if name == "lr" else name), args.param)
    check_scalar(OP, "seed", args.seed, args.param, torch.int64)
    check_no_derivative(OP, *args[:9])


def cost(sample: Sample, direction: str) -> Cost:
    """Some 16 operations an element; reads the gradient, and reads and writes the parameter and its states."""
    param, grad, exp_avg, exp_avg_sq, _ = sample.args
    copy = sample.kwargs.get("copy_dtype")
    states = rows.nbytes(param, exp_avg, exp_avg_sq)
    return Cost(16 * param.numel(), states + rows.nbytes(grad), states + (param.numel() * copy.itemsize if copy else 0))


CONTRACT = register(
    Contract(
        name=OP,
        family="optim",
        summary="one step of AdamW, with float32 masters, states of 16 bits or stochastic rounding",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=adamw_samples.inputs,
        cost=cost,
        workloads=adamw_samples.WORKLOADS,
        cpu_workloads=adamw_samples.CPU_WORKLOADS,
        edge_cases=adamw_samples.EDGE_CASES,
        bad_inputs=adamw_samples.BAD_INPUTS,
        in_place=("param", "exp_avg", "exp_avg_sq"),
        batch_dim=None,  # elements are independent, but the states are other arguments of the same shape
    )
)
