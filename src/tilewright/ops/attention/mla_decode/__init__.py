"""Multi-head latent attention of one or a few new tokens of each sequence over a cache of latents."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.dispatch.raw import OutputSpec
from tilewright.ops.attention.mla_decode.args import (
    BATCH_FIELDS,
    OP,
    MlaDecodeArgs,
    MlaDecodeBucket,
    bucket,
    raw_arguments,
)
from tilewright.ops.attention.mla_decode.checks import check
from tilewright.ops.attention.mla_decode.cost import cost
from tilewright.ops.attention.mla_decode.reference import attention
from tilewright.ops.attention.mla_decode.samples import BAD_INPUTS, EDGE_CASES, EDGE_GRID, inputs
from tilewright.ops.attention.mla_decode.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.rows import accumulate_dtype


@dispatch("mla_decode")
def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    lengths: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    indices: Tensor | None = None,
    d_v: int = 512,
    causal: bool = True,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """o = softmax(scale * q C^T) C[:, :d_v] of the newest tokens of B sequences: all heads read one cache C of latents.

    q: (B, S_q, H, D), 1 to 8 tokens each, or (B, H, D), bf16|fp16|fp32: the absorbed queries, each head's q W_UK joined
    with its rotated part; D = 576 = 512 + 64 in DeepSeek-V2 and V3.   kv_cache: (pages, page_size, D) or (pages,
    page_size, 1, D) in q's dtype, a token's latent joined with its rotated key; its value is its first d_v columns.
    Or of tokens of 656 bytes, uint8|float8_e4m3fn (pages, page_size, 656), for D = 576 and d_v = 512: 512 e4m3, four
    float32 scales of 128 numbers, 64 bf16, as `ops.kvcache.mla_layout.quantize_mla_cache` makes and
    `dequantize_mla_cache` reads them; kernels take those at multiples of 16 bytes.  Any page_size; strides are free,
    the last of 1: another costs a copy.
    lengths: (B,) int32: tokens of each sequence in the cache, the new ones included.   block_table: (B, max_pages)
    int32: the page of every page_size tokens of a sequence; pages may be shared.  None: the cache is contiguous,
    (B, capacity, D).  Returns o (B, S_q, H, d_v) or (B, H, d_v), in q's dtype; with return_lse also lse (B, S_q, H) or
    (B, H) float32, natural, as `merge_states` takes it.

    indices: (B, S_q, topk) int32, sparse attention: the slots page * page_size + offset that each token sees, in any
    order.  -1, or what is no slot, stands for none; a slot that is named twice counts twice.  There is no block_table
    then, and causal does not matter; lengths may be None, or say how many of the indices of a sequence count.

    The position of token i is lengths - S_q + i: the last one sees the last key.   causal: no key after its position.
    A token that sees nothing, as all of length 0, gets o = 0 and lse = -inf (with a sink, lse is the sink).
    scale: D^-0.5 by default; models pass that of their heads before absorption, 192^-0.5.
    sinks: (H,), exp(sinks[h]) joins the denominator.

    lengths, block_table and indices stay on the device, nothing waits for them, and the grid depends on shapes alone:
    one CUDA graph serves all of them.  Entries behind a length are not followed, and slots that no token sees are not
    read: they may hold anything, NaN too.  0 <= lengths <= capacity and pages that exist are the caller's promise;
    longer ones count as the capacity.  Under TILEWRIGHT_CHECK=1 they are looked at, which waits for the GPU, and an
    InputError names what is outside.
    Bits repeat.  Under numerics("batch_invariant") those of a sequence do not depend on the others, unless torch, which
    does not promise it, computes.  No gradient.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes and options that do not go together, and where a gradient is wanted.
    Source: DeepSeek-AI, "DeepSeek-V2", 2024, and "DeepSeek-V3.2", 2025 (indices); FlashMLA (the form of 656 bytes).
    """
    args = raw_arguments(q, kv_cache, lengths, block_table, indices, d_v, causal, scale, sinks)
    return _as_given(q, call(CONTRACT, args, backend), return_lse)


def reference(
    q: Tensor,
    kv_cache: Tensor,
    lengths: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    indices: Tensor | None = None,
    d_v: int = 512,
    causal: bool = True,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """The same in plain torch, keys gathered for every token."""
    args = raw_arguments(q, kv_cache, lengths, block_table, indices, d_v, causal, scale, sinks)
    return _as_given(q, attention(args), return_lse)


def _as_given(q: Tensor, results: tuple[Tensor, Tensor], return_lse: bool) -> Any:
    """Results without the dimension of tokens if q has none."""
    o, lse = results
    if q.dim() == 3:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def _outputs(args: MlaDecodeArgs) -> tuple[OutputSpec, ...]:
    """o (B, S_q, H, d_v) in q's dtype and lse (B, S_q, H), both contiguous."""
    lead = tuple(args.q.shape[:3])
    return ((*lead, args.d_v), args.q.dtype), (lead, accumulate_dtype(args.q.dtype))


FORWARD = RawOp(
    OP,
    "fwd",
    MlaDecodeArgs,
    package="tilewright.ops.attention",
    kernels=("sm90.mla_decode", "triton.mla_decode"),
    outputs=_outputs,
    reference=attention,
    bucket=bucket,
    bucket_names=MlaDecodeBucket._fields,
    batch_fields=BATCH_FIELDS,
    count=2,
)

CONTRACT = register(
    Contract(
        name=OP,
        family="decode",
        summary="multi-head latent attention of 1 to 8 new tokens a sequence over a cache of latents, dense or sparse",
        reference=reference,
        forward=FORWARD,
        check=lambda args: check(OP, args),
        inputs=inputs,
        cost=cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        edge_grid=EDGE_GRID,
        bad_inputs=BAD_INPUTS,
        batch_dim=None,  # a page holds tokens of any sequence
    )
)
