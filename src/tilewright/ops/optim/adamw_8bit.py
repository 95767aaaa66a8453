"""One step of AdamW for one parameter, whose averages have 8 bits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, RawOp, Sample, call, dispatch, register
from tilewright.dispatch.bucket import row_bucket
from tilewright.dispatch.raw import OutputSpec
from tilewright.dispatch.targets import several
from tilewright.ops import rows
from tilewright.ops.optim import adamw_8bit_samples as samples
from tilewright.ops.optim.adamw_checks import (
    check_codes,
    check_no_derivative,
    check_numbers,
    check_parameter,
    check_scalar,
)
from tilewright.ops.optim.adamw_step import numbers_of, stepped_weight
from tilewright.ops.optim.dynamic_map import BLOCK, from_codes, to_codes
from tilewright.ops.optim.memory import is_dense
from tilewright.ops.optim.rounding import random_words, round_stochastically

OP = "adamw_8bit"


class Adamw8bitArgs(NamedTuple):
    """The learning rate is the tensor `rate`, or else the number `lr`; copy_dtype is param's where there is no copy."""

    param: Tensor  # any shape
    grad: Tensor  # param's shape
    exp_avg: Tensor  # param's shape, uint8
    exp_avg_scale: Tensor  # (ceil(elements / 256),)
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor
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


class Adamw8bitBucket(NamedTuple):
    N: int  # elements, rounded up to a power of two


@dispatch(OP)
def adamw_8bit(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
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
    """`adamw` whose averages m and v are codes of 8 bits: a number of the dynamic map times the scale of a block of 256
    elements, in the order of a contiguous param.  Returns the new param, both averages, each followed by its scales,
    and param's copy if any.

    exp_avg, exp_avg_sq: uint8 of param's shape; code 127 of exp_avg and 0 of exp_avg_sq are 0.   exp_avg_scale,
    exp_avg_sq_scale: (ceil(elements / 256),) float32.   `ops/optim/dynamic_map.py` has the map and what is rounded how.
    out:        a tensor for each that is returned, each one run of memory: those of the arguments for a step in place.
                Tensors that are not contiguous cost a copy.
    Everything else as in `adamw`.  The step uses the new averages before they are rounded to the nearest codes.

    Codes and scales have the same bits in every backend.  An average below 2.8e-7 (m) or 1.7e-7 (v) of the largest of
    its block becomes 0; a block with a NaN or an infinity becomes that.  There is no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, shapes and devices, numbers out of range, and tensors that require a gradient.
    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021.
    """
    states = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    tensors = (param, grad, *states, step, seed, grad_scale, found_inf)
    args = _raw_arguments(tensors, lr, betas, eps, weight_decay, maximize, copy_dtype)
    count = 5 if copy_dtype is None else 6
    results: tuple[Tensor, ...] = call(CONTRACT, args, backend, several(out, count, 6))
    return results[:count]


def _raw_arguments(tensors: tuple[Any, ...], lr: Tensor | float, betas: Any, *numbers: Any) -> Adamw8bitArgs:
    """The arguments of the raw op.   tensors: all of them but the learning rate.   numbers: what follows betas."""
    param, grad, m, m_scale, v, v_scale, step, seed, grad_scale, found_inf = tensors
    eps, weight_decay, maximize, copy_dtype = numbers
    rate, (number, beta1, beta2) = numbers_of(OP, param, lr, betas)
    return Adamw8bitArgs(
        param, grad, m, m_scale, v, v_scale, step, seed, rate, grad_scale, found_inf,
        number, beta1, beta2, eps, weight_decay, maximize, copy_dtype or param.dtype,
    )  # fmt: skip


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
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
    """Plain torch.  Averages are float32 whatever the dtypes, so that there is one right code; the rest of a float64
    param is float64, and not rounded, whatever `copy_dtype` says.
    """
    states = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    tensors = (param, grad, *states, step, seed, grad_scale, found_inf)
    results = _stepped(_raw_arguments(tensors, lr, betas, eps, weight_decay, maximize, copy_dtype))
    return results[: 5 if copy_dtype is None else 6]


def _stepped(args: Adamw8bitArgs) -> tuple[Tensor, ...]:
    kind = rows.accumulate_dtype(args.param.dtype)
    g = args.grad.to(torch.float32)
    g = g if args.grad_scale is None else g / args.grad_scale.to(torch.float32).view(())
    g = -g if args.maximize else g
    m = from_codes(args.exp_avg, args.exp_avg_scale, signed=True)
    v = from_codes(args.exp_avg_sq, args.exp_avg_sq_scale, signed=False)
    m = m + (g - m) * (1 - args.beta1)
    v = v * args.beta2 + g * g * (1 - args.beta2)

    weight = stepped_weight(args, m.to(kind), v.to(kind))
    if args.seed is not None and args.param.dtype == torch.bfloat16:
        words = random_words(args.param.contiguous(), args.seed, 2 * args.step.to(torch.int64))
        weight = round_stochastically(weight, words & 0xFFFF)

    old = args.param, args.exp_avg, args.exp_avg_scale, args.exp_avg_sq, args.exp_avg_sq_scale
    new = weight, *to_codes(m, signed=True), *to_codes(v, signed=False)
    results = tuple(_stored(args, before, after) for before, after in zip(old, new, strict=True))
    if args.copy_dtype == args.param.dtype:
        return (*results, weight.new_empty(0, dtype=args.copy_dtype))
    return (*results, results[0].to(args.param.dtype if args.param.dtype == torch.float64 else args.copy_dtype))


def _stored(args: Adamw8bitArgs, old: Tensor, value: Tensor) -> Tensor:
    """`value` in the dtype of `old`; `old` after an overflow."""
    value = value.to(old.dtype)
    return value if args.found_inf is None else torch.where(args.found_inf.view(()) != 0, old, value)


def blocks_of(param: Tensor) -> int:
    """How many scales each average of a parameter has."""
    return -(-param.numel() // BLOCK)


def _outputs(args: Adamw8bitArgs) -> tuple[OutputSpec, ...]:
    param, blocks = args.param, blocks_of(args.param)
    codes = ((param.shape, torch.uint8), ((blocks,), args.exp_avg_scale.dtype))
    results: tuple[OutputSpec, ...] = ((param.shape, param.dtype), *codes, *codes)
    if args.copy_dtype == param.dtype:
        return (*results, ((0,), param.dtype))
    return (*results, (param.shape, param.dtype if param.dtype == torch.float64 else args.copy_dtype))


FORWARD = RawOp(
    OP,
    "fwd",
    Adamw8bitArgs,
    package="tilewright.ops.optim",
    kernels=("triton.adamw_8bit",),
    outputs=_outputs,
    reference=_stepped,
    bucket=lambda args: Adamw8bitBucket(row_bucket(args.param.numel())),
    bucket_names=Adamw8bitBucket._fields,
    batch_fields=(),
    count=6,
    out=True,
    refuses_out=lambda out, args: None if is_dense(out) else "one run of memory, in any order of the dimensions",
)


def check(args: Adamw8bitArgs) -> None:
    """Raise InputError for what the docstring of `adamw_8bit` excludes."""
    check_numbers(OP, args.lr, args.beta1, args.beta2, args.eps, args.weight_decay)
    check_parameter(OP, args.param, args.grad, args.copy_dtype, exp_avg=args.exp_avg, exp_avg_sq=args.exp_avg_sq)
    check_codes(OP, blocks_of(args.param), exp_avg=args.exp_avg, exp_avg_sq=args.exp_avg_sq,
                exp_avg_scale=args.exp_avg_scale, exp_avg_sq_scale=args.exp_avg_sq_scale)  # fmt: skip
    for name in ("step", "lr", "grad_scale", "found_inf"):
        check_scalar(OP, name, getattr(args, "rate" if name == "lr" else name), args.param)
    check_scalar(OP, "seed", args.seed, args.param, torch.int64)
    check_no_derivative(OP, *args[:11])


def cost(sample: Sample, direction: str) -> Cost:
    """Some 100 operations an element; reads the gradient, and reads and writes the parameter and its states."""
    param, grad, *states, _ = sample.args
    copy = sample.kwargs.get("copy_dtype")
    both = rows.nbytes(param, *states)
    return Cost(100 * param.numel(), both + rows.nbytes(grad), both + (param.numel() * copy.itemsize if copy else 0))


CONTRACT = register(
    Contract(
        name=OP,
        family="optim",
        summary="one step of AdamW with block-wise averages of 8 bits",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=cost,
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
        in_place=("param", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
        batch_dim=None,
    )
)
