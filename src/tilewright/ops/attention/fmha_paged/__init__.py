"""Attention of packed new tokens over a KV cache: decoding and chunks of prefill in one call."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.attention.fmha_paged.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.attention.paged.args import (
    BATCH_FIELDS,
    Cache,
    Options,
    PagedArgs,
    PagedBucket,
    bucket,
    raw_arguments,
)
from tilewright.ops.attention.paged.checks import check
from tilewright.ops.attention.paged.cost import cost
from tilewright.ops.attention.paged.outputs import outputs, targets
from tilewright.ops.attention.paged.reference import attention
from tilewright.ops.attention.paged.samples import PAGED_BAD_INPUTS, PAGED_CASES, PAGED_GRID, paged_inputs

_OP = "fmha_paged"


@dispatch("fmha_paged")
def fmha_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`fmha_decode` of sequences with any number of new tokens each: decoding and chunks of prefill in one call.

    q: (T, H, D), the new tokens of all sequences end to end.   cu_seqlens_q: (B + 1,) int32 beside q, from 0, never
    decreasing, at most T: where those of each sequence begin.  A sequence may have none.  Caches, lengths, block_table
    and options as in `fmha_decode`; lengths count the new tokens, whose keys are in the cache already, and token i of n
    has the position lengths - n + i.
    Returns o (T, H, D_v) in q's dtype; with return_lse also lse (T, H) float32, natural.   out: contiguous memory
    for o, or for the pair, to write instead of allocating.
    Tokens after the last sequence, as in a captured batch that is not full: o = 0, lse = -inf (with a sink, the sink).

    Numbers stay on the device and the grid depends on shapes alone: one CUDA graph serves all divisions of T tokens.
    TILEWRIGHT_CHECK=1 looks at them as in `fmha_decode`.
    Sequences with few tokens are cut along their keys, those with many along their tokens too, each in a launch of
    its own; both find their work on the device.  Bits repeat.  Under numerics("batch_invariant") those of a
    sequence do not depend on the others, unless torch, which does not promise it, computes.  No gradient.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes, scales and options that do not go together, and where a gradient is wanted.
    Source: Dao et al., "Flash-Decoding", 2023; Agrawal et al., "Sarathi-Serve", 2024.
    """
    cache = Cache(k_cache, v_cache, lengths, block_table, _starts(cu_seqlens_q))
    options = Options(causal, window, scale, softcap, sinks, k_scale, v_scale)
    o, lse = call(CONTRACT, raw_arguments(_OP, q, cache, options), backend, targets(out, return_lse))
    if out is not None:
        return out
    return (o, lse) if return_lse else o


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """The same in plain torch, keys gathered for every token."""
    cache = Cache(k_cache, v_cache, lengths, block_table, _starts(cu_seqlens_q))
    options = Options(causal, window, scale, softcap, sinks, k_scale, v_scale)
    o, lse = attention(raw_arguments(_OP, q, cache, options))
    return (o, lse) if return_lse else o


def _starts(cu_seqlens_q: Any) -> Tensor:
    if not isinstance(cu_seqlens_q, Tensor):
        raise InputError(f"{_OP}: cu_seqlens_q is a {type(cu_seqlens_q).__name__}; needs (B + 1,) int32 beside q.")
    return cu_seqlens_q


FORWARD = RawOp(
    _OP,
    "fwd",
    PagedArgs,
    package="tilewright.ops.attention",
    kernels=("sm90.decode", "triton.fmha_paged"),
    outputs=outputs,
    reference=attention,
    bucket=bucket,
    bucket_names=PagedBucket._fields,
    batch_fields=BATCH_FIELDS,
    count=2,
    out=True,
)

CONTRACT = register(
    Contract(
        name=_OP,
        family="decode",
        summary="attention of packed new tokens over a KV cache: decoding and chunks of prefill in one call",
        reference=reference,
        forward=FORWARD,
        check=lambda args: check(_OP, args),
        inputs=paged_inputs,
        cost=cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=PAGED_CASES,
        edge_grid=PAGED_GRID,
        bad_inputs=PAGED_BAD_INPUTS,
        batch_dim=None,
    )
)
