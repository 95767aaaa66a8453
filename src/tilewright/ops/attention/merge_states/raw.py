"""The raw ops of `merge_states` and their reference: stacks of states (N, B, H, S, D), one or two of them.

Two stacks instead of one, so that a sum so far and the next state need not be copied together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Gradient, RawOp
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.derivatives import vjp
from tilewright.dispatch.raw import OutputSpec
from tilewright.errors import InputError
from tilewright.ops.attention.layout import laid_like, readable, spec_like
from tilewright.ops.rows import accumulate_dtype

BUCKET = ("M", "D", "N")
"""Rows B * H * S in powers of two, their length, and how many states there are in both stacks."""

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def merge(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(o', lse') in plain torch, differentiable; without NaN where no state saw a key, forwards and backwards."""
    stacks = (o,) if other is None else (o, other)
    logs = lse if other_lse is None else torch.cat((lse, other_lse))
    lse_max = logs.detach().amax(0)
    lse_max = torch.where(lse_max == -torch.inf, 0.0, lse_max)
    weights = torch.exp(logs - lse_max)
    l_i = weights.sum(0)
    any_visible = l_i != 0
    divisor = torch.where(any_visible, l_i, 1.0)
    merged = torch.where(any_visible, lse_max + torch.log(divisor), -torch.inf)
    probabilities, empty = (weights / divisor).unsqueeze(-1), (logs == -torch.inf).unsqueeze(-1)
    acc, start = None, 0
    for stack in stacks:
        part = slice(start, start + stack.shape[0])
        added = (torch.where(empty[part], 0.0, stack.to(accumulate_dtype(stack.dtype))) * probabilities[part]).sum(0)
        acc, start = added if acc is None else acc + added, part.stop
    assert acc is not None
    return laid_like(acc.to(out_dtype), o[0]), merged


def _merge_backward(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    other: Tensor | None,
    other_lse: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    if other is None or other_lse is None:
        gradients = vjp(lambda a, b: merge(a, b, None, None, out_dtype), (o, lse), (do, dlse))
        return (*gradients, o.new_empty(0), lse.new_empty(0))
    return vjp(lambda a, b, c, d: merge(a, b, c, d, out_dtype), (o, lse, other, other_lse), (do, dlse))


def check(o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, out_dtype: torch.dtype) -> None:
    """Raises InputError for raw arguments that cannot run."""
    op = "merge_states"
    pairs = [(o, lse)] if other is None or other_lse is None else [(o, lse), (other, other_lse)]
    is_float64 = any(state.dtype == torch.float64 for state, _ in pairs)
    for state, logarithm in pairs:
        if state.dim() != 5 or state.shape[0] == 0 or state.shape[4] == 0 or state.shape[1:] != o.shape[1:]:
            raise InputError(f"{op}: o is {tuple(state.shape)} as (N, B, H, S, D); needs N and D of at least 1.")
        if logarithm.shape != state.shape[:4]:
            raise InputError(f"{op}: lse is {tuple(logarithm.shape)}; needs {tuple(state.shape[:4])}.")
        if logarithm.dtype != (torch.float64 if is_float64 else torch.float32) or (
            is_float64 and state.dtype != torch.float64
        ):
            raise InputError(f"{op}: lse is {logarithm.dtype} for o of {state.dtype}; needs float32, as fmha gives it.")
        if state.stride(4) != 1:
            raise InputError(f"{op}: o has a last stride of {state.stride(4)}; needs 1. Call .contiguous().")
        if state.device != o.device or logarithm.device != o.device:
            raise InputError(
                f"{op}: an o is on {state.device} and its lse on {logarithm.device}, the first o on {o.device}. "
                "Move them to one device."
            )
    if out_dtype not in ((torch.float64,) if is_float64 else _RESULTS):
        raise InputError(f"{op}: out_dtype is {out_dtype}; allowed are bfloat16, float16, float32.")


def _bucket(o: Tensor, lse: Tensor, other: Tensor | None, *_: Any) -> tuple[int, ...]:
    n, b, h, s, d = (hint(size) for size in o.shape)
    return row_bucket(b * h * s), d, n + (0 if other is None else hint(other.shape[0]))


def _outputs(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, out_dtype: torch.dtype
) -> tuple[OutputSpec, ...]:
    """o' lies as the first state does, by head or by token."""
    shape, _, strides = spec_like(o[0], o.shape[4])
    return (shape, out_dtype, strides), (tuple(lse.shape[1:]), lse.dtype)


def _gradients(
    do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, *_: Any
) -> tuple[OutputSpec, ...]:
    """Each dense, state after state; those of a second stack have no element where there is none."""
    return (*_stack_specs(o, lse, o, lse), *_stack_specs(other, other_lse, o, lse))


def _stack_specs(o: Tensor | None, lse: Tensor | None, like: Tensor, like_lse: Tensor) -> tuple[OutputSpec, OutputSpec]:
    if o is None or lse is None:
        return ((0,), like.dtype), ((0,), like_lse.dtype)
    shape, dtype, strides = spec_like(o[0], o.shape[4])
    states, elements = o.shape[0], o.shape[1] * o.shape[2] * o.shape[3] * o.shape[4]
    return ((states, *shape), dtype, (elements, *strides)), (tuple(lse.shape), lse.dtype)


def _raw_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    o, lse, other, other_lse = saved
    do, dlse = grads
    do = torch.zeros(o.shape[1:], dtype=args[4], device=o.device) if do is None else readable(do)
    return do, None if dlse is None else dlse.contiguous(), o, lse, other, other_lse, args[4]


_STATES = "Tensor o, Tensor lse, Tensor? other, Tensor? other_lse, ScalarType out_dtype"
FORWARD = RawOp(
    "merge_states",
    "fwd",
    _STATES,
    package="tilewright.ops.attention.merge_states",
    outputs=_outputs,
    reference=merge,
    bucket=_bucket,
    bucket_names=BUCKET,
    count=2,
)
BACKWARD = RawOp(
    "merge_states",
    "bwd",
    f"Tensor do, Tensor? dlse, {_STATES}",
    package="tilewright.ops.attention.merge_states",
    outputs=_gradients,
    reference=_merge_backward,
    bucket=lambda do, dlse, *states: _bucket(*states),
    bucket_names=BUCKET,
    count=4,
)
GRADIENT = Gradient(BACKWARD, inputs=(0, 1, 2, 3), save=lambda args, outputs: tuple(args[:4]), raw_args=_raw_args)
"""Gradients of both stacks and their lse.  Only the states are saved; the backward recomputes the weights."""
