"""Attention over disjoint sets of keys, joined into attention over all of them.  The contract."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, Sample, call, dispatch, register
from tilewright.ops import rows
from tilewright.ops.attention.merge_states import raw, samples
from tilewright.ops.attention.merge_states.arguments import raw_arguments, results
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
    return results(*raw.merge(*raw_arguments(o, lse, out_dtype)), lse)


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


def check(*args: Any) -> None:
    """Raises InputError for what the docstring of `merge_states` excludes."""
    raw.check(*args)


CONTRACT = register(
    Contract(
        name="merge_states",
        family="attention",
        summary="attention over disjoint sets of keys, joined",
        reference=reference,
        forward=raw.FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=cost,
        gradient=raw.GRADIENT,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        edge_grid={"N": (1, 2, 3, 4, 5, 8, 9, 16, 17)},  # states
        bad_inputs=samples.BAD_INPUTS,
        batch_dim=None,  # rows are independent, but stand in another dimension of the states than of the result
    )
)
