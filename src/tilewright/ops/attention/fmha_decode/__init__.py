"""Attention of one or a few new tokens of each sequence over a KV cache."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.attention.fmha_decode.workloads import CPU_WORKLOADS, WORKLOADS
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
from tilewright.ops.attention.paged.samples import DECODE_BAD_INPUTS, DECODE_CASES, DECODE_GRID, decode_inputs

_OP = "fmha_decode"
MOST_TOKENS = 8
"""New tokens of a sequence; more are `fmha_paged`'s."""


@dispatch("fmha_decode")
def fmha_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
    """o = softmax(scale * q K^T) V of the newest tokens of B sequences, whose keys and values lie in a cache.

    q: (B, S_q, H, D), 1 to 8 tokens each, or (B, H, D), bf16|fp16|fp32.   k_cache: (pages, page_size, H_kv, D),
    v_cache: (pages, page_size, H_kv, D_v), in q's dtype, or both float8_e4m3fn with scales.  Query head h reads key
    head h // (H / H_kv).  Any page_size; strides are free, the last of 1: another costs a copy.
    lengths: (B,) int32: tokens of each sequence in the cache, the new ones included.   block_table: (B, max_pages)
    int32: the page of every page_size tokens of a sequence; pages may be shared.  None: caches are contiguous,
    (B, capacity, H_kv, D).  Returns o (B, S_q, H, D_v) or (B, H, D_v), in q's dtype; with return_lse also lse
    (B, S_q, H) or (B, H) float32, natural, as `merge_states` takes it.   out: contiguous memory for o, or for the pair,
    to write instead of allocating.

    The position of token i is lengths - S_q + i: the last one sees the last key.   causal: no key after its position.
    window: (left, 0), the keys before it that a token sees, None for no limit.  A token that sees nothing, as all of
    length 0, gets o = 0 and lse = -inf (with a sink, lse is the sink).
    scale: D^-0.5 by default.   softcap: s = softcap * tanh(s / softcap).   sinks: (H,), exp(sinks[h]) joins the
    denominator.   k_scale, v_scale: float32, (H_kv,) or (pages, page_size, H_kv): value = scale * stored.

    Lists of pages in compressed rows (CSR): `kv_block_table`.   A prefix that all sequences share: `merge_states`.

    lengths and block_table stay on the device, nothing waits for them, and the grid depends on shapes alone: one CUDA
    graph serves all lengths and tables.  Programs share the keys evenly whatever the lengths are.  Entries of the table
    behind a length are not followed, and slots that no token sees are not read: they may hold anything, NaN too.
    0 <= lengths <= capacity and pages that exist are the caller's promise; longer ones count as the capacity.  Under
    TILEWRIGHT_CHECK=1 both are looked at, which waits for the GPU, and an InputError names what is outside.
    Bits repeat.  Under numerics("batch_invariant") those of a sequence do not depend on the others, unless torch, which
    does not promise it, computes.  No gradient.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes, scales and options that do not go together, and where a gradient is wanted.
    Source: Dao et al., "Flash-Decoding", 2023; Kwon et al., "PagedAttention", 2023.
    """
    flat, lead = _flat(q, lengths)
    cache = Cache(k_cache, v_cache, lengths, block_table, None)
    options = Options(causal, window, scale, softcap, sinks, k_scale, v_scale)
    o, lse = call(CONTRACT, raw_arguments(_OP, flat, cache, options), backend, targets(out, return_lse, lead))
    if out is not None:
        return out
    o = o.view(*lead, *o.shape[1:])
    return (o, lse.view(*lead, lse.shape[1])) if return_lse else o


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
    flat, lead = _flat(q, lengths)
    cache = Cache(k_cache, v_cache, lengths, block_table, None)
    options = Options(causal, window, scale, softcap, sinks, k_scale, v_scale)
    o, lse = attention(raw_arguments(_OP, flat, cache, options))
    o = o.view(*lead, *o.shape[1:])
    return (o, lse.view(*lead, lse.shape[1])) if return_lse else o


def _flat(q: Any, lengths: Any) -> tuple[Tensor, tuple[int, ...]]:
    """q as (T, H, D), and the dimensions that stood for T."""
    if not isinstance(q, Tensor):
        raise InputError(f"{_OP}: q is a {type(q).__name__}; needs a torch.Tensor.")
    if q.dim() not in (3, 4):
        raise InputError(f"{_OP}: q is {tuple(q.shape)}; needs (B, S_q, H, D), or (B, H, D) for one token each.")
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.shape[0] != q.shape[0]:
        got = tuple(lengths.shape) if isinstance(lengths, Tensor) else f"a {type(lengths).__name__}"
        raise InputError(f"{_OP}: lengths is {got}; needs ({q.shape[0]},) int32, one for each sequence of q.")
    if q.dim() == 4 and not 1 <= q.shape[1] <= MOST_TOKENS:
        raise InputError(f"{_OP}: q is {tuple(q.shape)}; S_q is 1 to {MOST_TOKENS}. For more, call fmha_paged.")
    return q.reshape(-1, *q.shape[-2:]) if q.dim() == 4 else q, tuple(q.shape[:-2])


FORWARD = RawOp(
    _OP,
    "fwd",
    PagedArgs,
    package="tilewright.ops.attention",
    kernels=("sm90.decode", "triton.fmha_decode"),
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
        summary="attention of 1 to 8 new tokens a sequence over a KV cache, paged or contiguous",
        reference=reference,
        forward=FORWARD,
        check=lambda args: check(_OP, args),
        inputs=decode_inputs,
        cost=cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=DECODE_CASES,
        edge_grid=DECODE_GRID,
        bad_inputs=DECODE_BAD_INPUTS,
        batch_dim=None,  # a page holds keys of any sequence
    )
)
