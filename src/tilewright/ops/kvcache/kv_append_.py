"""Write the K and V of new tokens into a paged or contiguous cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, Promises, RawOp, Sample, call_in_place, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.kvcache import append_samples, checks, layout
from tilewright.ops.kvcache.samples import EDGE_GRID


class KvAppendArgs(NamedTuple):
    k: Tensor  # (T, H_kv, D)
    v: Tensor  # (T, H_kv, D_v)
    k_cache: Tensor  # (pages, page_size, H_kv, D)
    v_cache: Tensor  # (pages, page_size, H_kv, D_v)
    lengths: Tensor  # (B,)
    block_table: Tensor | None  # (B, max_pages)
    cu_seqlens: Tensor | None  # (B + 1,)
    k_scale: Tensor | None  # (H_kv,) or (pages, page_size, H_kv)
    v_scale: Tensor | None


class KvAppendBucket(NamedTuple):
    T: int  # rounded up to a power of two
    H_kv: int
    D: int
    scales: int  # 0: none, 1: of heads, 2: of tokens


@dispatch("kv_append_")
def kv_append_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """cache[slot of token t] = k[t], and so v: token i of the n_b new ones of sequence b has position
    lengths[b] - n_b + i.  Writes into the caches, and into scales of tokens; returns None.

    k_cache:     (pages, page_size, H_kv, D) bf16|fp16|fp32|e4m3, any strides.   v_cache: the same, D_v.
    k, v:        (T, H_kv, D), (T, H_kv, D_v), packed new tokens in the caches' dtype; for e4m3 bf16|fp16|fp32.
    lengths:     (B,) int32, tokens of each sequence in the cache, the new ones included.
    block_table: (B, max_pages) int32, the page of each page_size tokens of a sequence.  None: contiguous caches
                 (B, capacity, H_kv, D).  Entries behind a length are not read as pages.  Of CSR: `kv_block_table`.
    cu_seqlens:  (B + 1,) int32, sequence b's new tokens are rows cu_seqlens[b] .. cu_seqlens[b + 1] of k and v; None:
                 T = B * n.
    k_scale, v_scale: float32, value = scale * stored, for e4m3 caches.  (H_kv,): given; what is beyond +-448 becomes
                 +-448.   (pages, page_size, H_kv): computed, max(amax, 1e-4) / 448 of a token's head, and written.

    Nothing is read on the host: one CUDA graph serves all lengths and tables.  Padding is not written: tokens from
    cu_seqlens[B] on, and those at negative positions, as a sequence of length 0 has.  Slots of different tokens must be
    different.  On a CPU, and on a GPU under TILEWRIGHT_CHECK=1, lengths and pages outside of the cache raise
    InputError; otherwise a token without a slot is not written.  There is no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes or devices other than these, and for tensors that require a gradient.
    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    """
    args = KvAppendArgs(k, v, k_cache, v_cache, lengths, block_table, cu_seqlens, k_scale, v_scale)
    call_in_place(CONTRACT, args, backend)


def reference(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Plain torch, in place too."""
    slots = layout.token_slots(k_cache, k.shape[0], lengths, block_table, cu_seqlens)
    layout.append(k_cache, slots, k, k_scale)
    layout.append(v_cache, slots, v, v_scale)


def _raw(args: KvAppendArgs) -> None:
    return reference(
        args.k_cache, args.v_cache, args.k, args.v, args.lengths,
        block_table=args.block_table, cu_seqlens=args.cu_seqlens, k_scale=args.k_scale, v_scale=args.v_scale,
    )  # fmt: skip


def bucket(args: KvAppendArgs) -> KvAppendBucket:
    """The bucket of a call."""
    tokens, heads, depth = args.k.shape
    scales = 0 if args.k_scale is None else 1 if args.k_scale.dim() == 1 else 2
    return KvAppendBucket(row_bucket(tokens), hint(heads), max(hint(depth), hint(args.v.shape[2])), scales)


FORWARD = RawOp(
    "kv_append_",
    "fwd",
    KvAppendArgs,
    package="tilewright.ops.kvcache",
    kernels=("triton.kv_append",),
    outputs=lambda args: (),
    reference=_raw,
    bucket=bucket,
    bucket_names=KvAppendBucket._fields,
    count=0,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
)


def check(args: KvAppendArgs) -> None:
    """Raise InputError for what the docstring of `kv_append_` excludes."""
    op, cache = "kv_append_", args.k_cache
    checks.check_caches(op, cache, args.v_cache, args.k_scale, args.v_scale)
    checks.check_tensors(op, cache, k=args.k, v=args.v)
    tokens = args.k.shape[0] if args.k.dim() else 0
    checks.check_packed(op, cache, tokens, k=args.k, v=args.v)
    checks.check_fits(op, "k", args.k, cache)
    checks.check_fits(op, "v", args.v, args.v_cache)
    if args.k.shape[2] == 0 or args.v.shape[2] == 0:
        raise InputError(f"{op}: k is {tuple(args.k.shape)}, v {tuple(args.v.shape)}; D and D_v must be at least 1.")
    checks.check_sequences(op, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    checks.check_numbers(op, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads k, v and the metadata; writes as many elements of the caches, and scales of tokens.  An operation each."""
    k_cache, _, k, v, lengths = sample.args
    options = sample.kwargs
    elements = k.numel() + v.numel()
    scale = options.get("k_scale")
    scales = 0 if scale is None or scale.dim() == 1 else 2 * 4 * k.shape[0] * k.shape[1]
    metadata = rows.nbytes(lengths, options.get("cu_seqlens")) + 4 * min(k.shape[0], rows.nbytes(lengths))
    return Cost(elements, rows.nbytes(k, v) + metadata, elements * k_cache.element_size() + scales)


CONTRACT = register(
    Contract(
        name="kv_append_",
        family="kvcache",
        summary="keys and values of new tokens into a paged or contiguous cache",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=append_samples.inputs,
        cost=cost,
        workloads=append_samples.WORKLOADS,
        cpu_workloads=append_samples.CPU_WORKLOADS,
        edge_cases=append_samples.EDGE_CASES,
        bad_inputs=append_samples.BAD_INPUTS,
        batch_dim=None,  # tokens of all sequences are packed, and lie in the caches by other dimensions
        edge_grid={**EDGE_GRID, "H_kv": (1, 2, 3, 8)},
        promises=Promises(reference_bits=True),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )
)
