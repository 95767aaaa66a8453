"""The raw ops of `fmha`, forward and backward, and what the forward saves for the backward.

`fmha_varlen` has the same ones under its own name: tokens of many sequences in one row want other tiles than one
sequence of that length, so they have their own rows in tables.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Gradient, RawOp
from tilewright.dispatch.raw import OutputSpec
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.bucket import FmhaBucket, backward_bucket, forward_bucket
from tilewright.ops.attention.fmha.torch_first import torch_first, torch_first_backward
from tilewright.ops.attention.layout import dense, spec_like
from tilewright.ops.attention.reference import attention, attention_backward
from tilewright.ops.rows import accumulate_dtype


def outputs_of(args: Any) -> tuple[OutputSpec, ...]:
    """Results of a forward: o has the memory order of q; lse is (B, H, S_q) contiguous."""
    q = args.q
    return spec_like(q, args.v.shape[3]), (tuple(q.shape[:3]), accumulate_dtype(q.dtype))


def gradients_of(args: Any) -> tuple[OutputSpec, ...]:
    """Results of a backward: each gradient has the memory order of its operand; without sinks dsinks is empty."""
    sinks = args.sinks
    dsinks_spec = ((0,), args.lse.dtype) if sinks is None else (tuple(sinks.shape), sinks.dtype)
    return (*(spec_like(t, t.shape[3]) for t in (args.q, args.k, args.v)), dsinks_spec)


def _save(args: FmhaArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """All six tensors of the forward, then both results."""
    return (args.q, args.k, args.v, args.sinks, args.slopes, args.mask_data, *outputs)


def _raw_args(grads: tuple[Any, ...], saved: tuple[Any, ...], args: FmhaArgs, needs: Any) -> FmhaBackwardArgs:
    q, k, v, sinks, slopes, mask_data, o, lse = saved
    do, dlse = grads
    # Kernels take do in the operands' dtype with dense rows
    do = torch.zeros_like(o) if do is None else dense(do.to(o.dtype))
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    mask = args.mask._replace(mask_data=mask_data)
    return FmhaBackwardArgs(do, dlse, q, k, v, o, lse, sinks, slopes, *mask, args.scale, args.softcap)


class Forward(NamedTuple):
    """What the forwards of both ops do not share."""

    args: type[tuple[Any, ...]]
    reference: Callable[..., tuple[Tensor, Tensor]]
    bucket: Callable[..., tuple[int, ...]]
    bucket_names: tuple[str, ...]


DENSE = Forward(FmhaArgs, attention, forward_bucket, FmhaBucket._fields)


def raw_ops(
    op: str, kernels: tuple[str, ...], backward_kernels: tuple[str, ...], form: Forward = DENSE
) -> tuple[RawOp, RawOp, Gradient]:
    """Forward, backward and gradient of `op`: of q, k, v and sinks."""
    forward = RawOp(
        op,
        "fwd",
        form.args,
        package="tilewright.ops.attention",
        kernels=kernels,
        outputs=outputs_of,
        reference=form.reference,
        bucket=form.bucket,
        bucket_names=form.bucket_names,
        count=2,
        torch_first=torch_first,
    )
    backward = RawOp(
        op,
        "bwd",
        FmhaBackwardArgs,
        package="tilewright.ops.attention",
        kernels=backward_kernels,
        outputs=gradients_of,
        reference=attention_backward,
        bucket=backward_bucket,
        bucket_names=FmhaBucket._fields,
        count=4,
        torch_first=torch_first_backward,
    )
    gradient = Gradient(backward, inputs=("q", "k", "v", "sinks"), save=_save, raw_args=_raw_args, recomputes=False)
    return forward, backward, gradient
