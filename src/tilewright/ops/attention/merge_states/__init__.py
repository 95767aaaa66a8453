"""Attention over disjoint sets of keys, joined into attention over all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, Gradient, RawOp, Sample, call, dispatch, register
from tilewright.dispatch.raw import OutputSpec
from tilewright.ops import rows
from tilewright.ops.attention.layout import readable, spec_like
from tilewright.ops.attention.merge_states import samples
from tilewright.ops.attention.merge_states.args import (
    MergeStatesArgs,
    MergeStatesBackwardArgs,
    MergeStatesBucket,
    bucket,
    raw_arguments,
    results,
)
from tilewright.ops.attention.merge_states.checks import check
from tilewright.ops.attention.merge_states.reference import merge, merge_backward
from tilewright.ops.attention.merge_states.workloads import CPU_WORKLOADS, WORKLOADS


@dispatch("merge_states")
def merge_states(
    o: Tensor | Sequence[Tensor],
    lse: Tensor | Sequence[Tensor],
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """lse' = log sum_i exp(lse_i), o' = sum_i exp(lse_i - lse') o_i: what attention over the keys of all states gives.

    A state is the (o, lse) of attention over some of the keys, as `fmha(..., return_lse=True)` returns it: a shared
    prefix and the rest (cascade), parts of a long cache (split KV), the block of one device (ring attention).
    o: (N, ..., D) bf16|fp16|fp32, lse: (N, ...) float32, natural logarithms, N states of one to three dimensions
    "...", as (B, H, S).   Or two sequences, of N tensors (..., D) and of N tensors (...): one or two states are read
    where they lie, and may differ in dtype, more are stacked first.   Strides are free, the last of o is 1: another
    costs a copy.
    Returns o' (..., D) in out_dtype and lse' (...) float32.   out_dtype: bf16|fp16|fp32, by default the dtype to which
    torch promotes those of the states.   Ring attention keeps its sum in float32:
    `o, lse = merge_states((o, o_i), (lse, lse_i), out_dtype=torch.float32)`.
    Decoding behind a prefix of whole pages that all sequences share: `fmha_paged` with the tokens of all as one
    sequence over the shared pages, causal=False, so that their keys are read once, and `fmha_decode` over the others.

    Computed in float32, added in an order that does not change from call to call, rounded once.  A state with an lse of
    -inf, which saw no key, adds nothing, whatever its o holds; where all are so, o' = 0 and lse' = -inf.  Logarithms to
    base 2, as those of FlashInfer, must be multiplied by ln 2 before.  Sinks (of `fmha`) belong into one state only.
    Gradients: of every o_i and lse_i, also through lse'.  They repeat bit for bit.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for no states, shapes that differ, o that is not floating, and lse other than float32.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Ye et al., "FlashInfer", 2025.
    """
    merged: tuple[Tensor, Tensor] = call(CONTRACT, raw_arguments(o, lse, out_dtype), backend)
    return results(*merged, lse)


def reference(
    o: Tensor | Sequence[Tensor], lse: Tensor | Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    return results(*merge(raw_arguments(o, lse, out_dtype)), lse)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward: a multiplication and an addition an element; each state is read once.  Backward: a product of every
    element with that of do, its sum, and the product with a weight; reads the states and do, writes a gradient of each.
    """
    o, lse, other, other_lse, out_dtype = raw_arguments(sample.args[0], sample.args[1], sample.kwargs.get("out_dtype"))
    elements = o.numel() + (0 if other is None else other.numel())
    states = rows.nbytes(o, lse, other, other_lse)
    merged = o[0].numel() * out_dtype.itemsize + lse[0].numel() * 4
    if direction == "fwd":
        return Cost(2 * elements, states, merged)
    return Cost(3 * elements, states + merged, states)


def _outputs(args: MergeStatesArgs) -> tuple[OutputSpec, ...]:
    """o' has the memory order of the first state, by head or by token."""
    shape, _, strides = spec_like(args.o[0], args.o.shape[4])
    return (shape, args.out_dtype, strides), (tuple(args.lse.shape[1:]), args.lse.dtype)


def _gradients(args: MergeStatesBackwardArgs) -> tuple[OutputSpec, ...]:
    """Each dense, state after state; those of a second stack have no element where there is none."""
    return (*_stack_specs(args.o, args.lse, args), *_stack_specs(args.other, args.other_lse, args))


def _stack_specs(o: Tensor | None, lse: Tensor | None, args: MergeStatesBackwardArgs) -> tuple[OutputSpec, OutputSpec]:
    if o is None or lse is None:
        return ((0,), args.o.dtype), ((0,), args.lse.dtype)
    shape, dtype, strides = spec_like(o[0], o.shape[4])
    states, elements = o.shape[0], o.shape[1] * o.shape[2] * o.shape[3] * o.shape[4]
    return ((states, *shape), dtype, (elements, *strides)), (tuple(lse.shape), lse.dtype)


def _raw_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: MergeStatesArgs, needs: Any
) -> MergeStatesBackwardArgs:
    o, lse, other, other_lse = saved
    do, dlse = grads
    do = torch.zeros(o.shape[1:], dtype=args.out_dtype, device=o.device) if do is None else readable(do)
    dlse = None if dlse is None else dlse.contiguous()
    return MergeStatesBackwardArgs(do, dlse, o, lse, other, other_lse, args.out_dtype)


FORWARD = RawOp(
    "merge_states",
    "fwd",
    MergeStatesArgs,
    package="tilewright.ops.attention",
    kernels=("triton.merge_states",),
    outputs=_outputs,
    reference=merge,
    bucket=bucket,
    bucket_names=MergeStatesBucket._fields,
    count=2,
)
BACKWARD = RawOp(
    "merge_states",
    "bwd",
    MergeStatesBackwardArgs,
    package="tilewright.ops.attention",
    kernels=("triton.merge_states",),
    outputs=_gradients,
    reference=merge_backward,
    bucket=lambda args: bucket(args.forward),
    bucket_names=MergeStatesBucket._fields,
    count=4,
)

CONTRACT = register(
    Contract(
        name="merge_states",
        family="attention",
        summary="attention over disjoint sets of keys, joined",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("o", "lse", "other", "other_lse"),
            # Only the states; the backward recomputes the weights
            save=lambda args, outputs: (args.o, args.lse, args.other, args.other_lse),
            raw_args=_raw_args,
        ),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        edge_grid={"N": (1, 2, 3, 4, 5, 8, 9, 16, 17)},  # states
        bad_inputs=samples.BAD_INPUTS,
        batch_dim=None,  # rows are independent, but stand in another dimension of the states than of the result
    )
)
