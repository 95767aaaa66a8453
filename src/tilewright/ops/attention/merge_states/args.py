"""Arguments of the raw ops, one or two stacks (N, B, H, S, D), from the states of a public call; and their bucket.

Two stacks instead of one, so that a sum so far and the next state need not be copied together.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.hardware.autocast import AUTOCASTS
from tilewright.ops.attention.layout import readable
from tilewright.ops.rows import FLOATS

_OP = "merge_states"
_LEAD = 3  # dimensions of a row's place in the raw op: B, H, S


class MergeStatesArgs(NamedTuple):
    """Arguments of the forward."""

    o: Tensor  # (N, B, H, S, D), unit last stride
    lse: Tensor  # (N, B, H, S) float32
    other: Tensor | None  # another stack, as o
    other_lse: Tensor | None
    out_dtype: torch.dtype


class MergeStatesBackwardArgs(NamedTuple):
    """Arguments of the backward: the gradients of both results, then the states."""

    do: Tensor  # (B, H, S, D)
    dlse: Tensor | None  # (B, H, S) float32
    o: Tensor
    lse: Tensor
    other: Tensor | None
    other_lse: Tensor | None
    out_dtype: torch.dtype

    @property
    def forward(self) -> MergeStatesArgs:
        """The arguments of the forward."""
        return MergeStatesArgs(self.o, self.lse, self.other, self.other_lse, self.out_dtype)


class MergeStatesBucket(NamedTuple):
    """The tuning key, in both directions."""

    M: int  # rows B * H * S, rounded up to a power of two
    D: int  # their length
    N: int  # states in both stacks


def bucket(args: MergeStatesArgs) -> MergeStatesBucket:
    """The bucket of a forward; that of a backward is the same."""
    n, b, h, s, d = (hint(size) for size in args.o.shape)
    return MergeStatesBucket(row_bucket(b * h * s), d, n + (0 if args.other is None else hint(args.other.shape[0])))


def raw_arguments(
    o: Tensor | Sequence[Tensor], lse: Tensor | Sequence[Tensor], out_dtype: torch.dtype | None
) -> MergeStatesArgs:
    """Two states are two stacks of one, views; others are one stack."""
    if isinstance(o, Tensor) and isinstance(lse, Tensor):
        _check_state(o, lse, 1)
        return MergeStatesArgs(_widened(readable(o)), _widened_lse(lse), None, None, _result(out_dtype, o))
    states, logarithms = _listed(o, "o"), _listed(lse, "lse")
    if not states or len(states) != len(logarithms):
        raise InputError(f"{_OP}: {len(states)} o and {len(logarithms)} lse; needs as many of each, at least one.")
    for state, logarithm in zip(states, logarithms, strict=True):
        _check_state(state, logarithm, 0)
        if state.shape != states[0].shape or state.device != states[0].device:
            raise InputError(
                f"{_OP}: an o is {tuple(state.shape)} on {state.device}, the first {tuple(states[0].shape)} on "
                f"{states[0].device}; all must be alike."
            )
    dtype = _result(out_dtype, *states)
    if len(states) > 2:
        return MergeStatesArgs(_widened(_stacked(states)), _widened_lse(_stacked(logarithms)), None, None, dtype)
    parts = [
        (_widened(readable(a).unsqueeze(0)), _widened_lse(b.unsqueeze(0)))
        for a, b in zip(states, logarithms, strict=True)
    ]
    (first, first_lse), (other, other_lse) = parts[0], parts[1] if len(parts) == 2 else (None, None)
    return MergeStatesArgs(first, first_lse, other, other_lse, dtype)


def results(o: Tensor, lse: Tensor, value: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The raw op's results (B, H, S, D) and (B, H, S) with the dimensions that the caller's lse has."""
    dims = value.dim() - 1 if isinstance(value, Tensor) else value[0].dim()
    added = (0,) * (_LEAD - dims)
    return o[added], lse[added]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, in the dtype to which torch promotes theirs: autocast would choose another."""
    common, kind = _result(None, *tensors), tensors[0].device.type
    with torch.autocast(kind, enabled=False) if kind in AUTOCASTS else nullcontext():
        return torch.stack([t.to(common) for t in tensors])


def _listed(value: Any, name: str) -> list[Tensor]:
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        raise InputError(
            f"{_OP}: {name} is a {type(value).__name__}; needs two tensors, stacks of states, or two sequences of "
            "tensors."
        )
    return list(value)


def _check_state(o: Any, lse: Any, stacked: int) -> None:
    """What views can be made of.  stacked: 1 if the first dimension counts states."""
    for name, t in (("o", o), ("lse", lse)):
        if not isinstance(t, Tensor):
            raise InputError(f"{_OP}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
    if o.dtype not in FLOATS:
        raise InputError(f"{_OP}: o is {o.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
    if not 1 <= lse.dim() - stacked <= _LEAD or tuple(o.shape[:-1]) != tuple(lse.shape):
        form = "(N, ..., D) and (N, ...)" if stacked else "(..., D) and (...)"
        raise InputError(
            f"{_OP}: o is {tuple(o.shape)} and lse {tuple(lse.shape)}; needs {form} with one to three dimensions '...'."
        )


def _widened(o: Tensor) -> Tensor:
    """(N, ..., D) as (N, B, H, S, D), a view."""
    return o[(slice(None), *(None,) * (_LEAD + 2 - o.dim()))]


def _widened_lse(lse: Tensor) -> Tensor:
    """(N, ...) as (N, B, H, S), a view."""
    return lse[(slice(None), *(None,) * (_LEAD + 1 - lse.dim()))]


def _result(out_dtype: torch.dtype | None, *states: Tensor) -> torch.dtype:
    """float64, which only an oracle has, stays itself."""
    common = reduce(torch.promote_types, [t.dtype for t in states])
    return common if out_dtype is None or common == torch.float64 else out_dtype
