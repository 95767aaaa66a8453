"""Arguments of the raw ops of `fmha_decode` and `fmha_paged`, from those of a public call, and their bucket."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.preference import current_numerics
from tilewright.ops.attention.arguments import of_heads
from tilewright.ops.attention.bucket import SINKS, SOFTCAP
from tilewright.ops.attention.layout import addressable, readable
from tilewright.ops.attention.paged.checks import band_of, check_tensors
from tilewright.ops.attention.score import split

WINDOW = 8
"""A bit of `extras` in a bucket, beside those of `fmha`."""
AS_QUERIES, HEAD_SCALES, TOKEN_SCALES = range(3)
"""`cache` in a bucket: in the dtype of the queries, or e4m3 with a scale for each head, or for each token and head."""
_WIDEST_PAGE = 256


class PagedArgs(NamedTuple):
    """Arguments of the forward.  T: new tokens of B sequences, T / B each without `cu_seqlens`."""

    q: Tensor  # (T, H, D), unit last stride, as the caches
    k_cache: Tensor  # (pages, page_size, H_kv, D)
    v_cache: Tensor  # (pages, page_size, H_kv, D_v)
    lengths: Tensor  # (B,) int32
    block_table: Tensor | None  # (B, max_pages) int32; None: page b is sequence b
    cu_seqlens: Tensor | None  # (B + 1,) int32
    sinks: Tensor | None  # (H,) float32
    k_scale: Tensor | None  # (H_kv,) or (pages, page_size, H_kv) float32
    v_scale: Tensor | None
    left: int  # keys before its position that a query sees; -1: no limit
    causal: bool
    scale: float
    softcap: float  # 0: none
    batch_invariant: bool  # may the other sequences decide how the keys of one are split?

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence that the cache can hold."""
        page_size = self.k_cache.shape[1]
        return page_size if self.block_table is None else self.block_table.shape[1] * page_size


class PagedBucket(NamedTuple):
    """The tuning key."""

    B: int  # sequences, rounded up to a power of two, as T and keys
    T: int  # new tokens of all sequences
    keys: int  # capacity of a sequence
    S_q: int  # new tokens of each sequence; 0 where `cu_seqlens` says
    H_kv: int
    group: int  # query heads of a key head
    D: int
    D_v: int
    page: int  # tokens of a page, at most 256; 0 for contiguous caches
    cache: int
    extras: int
    aligned: int  # 1 if vector loads can address every row


BATCH_FIELDS = ("B", "T", "keys")
"""What `numerics("batch_invariant")` ignores: a table is as wide as the longest sequence needs."""


class Options(NamedTuple):
    """The options of a public call, but for what it returns."""

    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class Cache(NamedTuple):
    """The tensors of a call that say where the keys of each sequence are."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor | None
    cu_seqlens: Tensor | None


def raw_arguments(op: str, q: Tensor, cache: Cache, options: Options) -> PagedArgs:
    """Arguments of the raw op for q (T, H, D).  Raises InputError for what cannot be made into them."""
    check_tensors(op, q, cache, options.k_scale, options.v_scale)
    left, causal = band_of(op, options.causal, options.window)
    scores = split(op, None, options.softcap, options.sinks)
    scale = options.scale
    if scale is None:
        scale = float(q.shape[-1]) ** -0.5 if q.shape[-1] else 1.0
    scale = float(scale) if isinstance(scale, int) else scale
    return PagedArgs(
        readable(q), readable(cache.k), readable(cache.v), _dense(cache.lengths), _rows(cache.block_table),
        None if cache.cu_seqlens is None else _dense(cache.cu_seqlens), of_heads(scores.sinks, q),
        options.k_scale, options.v_scale, left, causal, scale, scores.softcap,
        current_numerics() == "batch_invariant",
    )  # fmt: skip


def _dense(t: Tensor) -> Tensor:
    return t.contiguous()


def _rows(table: Tensor | None) -> Tensor | None:
    return None if table is None else readable(table)


def bucket(args: PagedArgs) -> PagedBucket:
    """The bucket of a call."""
    q, k, v = args.q, args.k_cache, args.v_cache
    batch, tokens, kv_heads = hint(args.lengths.shape[0]), hint(q.shape[0]), hint(k.shape[2])
    bits = {SOFTCAP: bool(args.softcap), SINKS: args.sinks is not None, WINDOW: args.left >= 0}
    return PagedBucket(
        B=row_bucket(batch),
        T=row_bucket(tokens),
        keys=row_bucket(args.capacity),
        S_q=0 if args.cu_seqlens is not None else tokens // max(batch, 1),
        H_kv=kv_heads,
        group=hint(q.shape[1]) // max(kv_heads, 1),
        D=hint(q.shape[2]),
        D_v=hint(v.shape[3]),
        page=0 if args.block_table is None else min(hint(k.shape[1]), _WIDEST_PAGE),
        cache=cache_kind(k, args.k_scale, args.v_scale),
        extras=sum(bit for bit, present in bits.items() if present),
        aligned=int(addressable(q) and addressable(k) and addressable(v)),
    )


def cache_kind(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> int:
    """AS_QUERIES, HEAD_SCALES or TOKEN_SCALES."""
    if k_cache.dtype != torch.float8_e4m3fn:
        return AS_QUERIES
    return TOKEN_SCALES if any(t is not None and t.dim() == 3 for t in (k_scale, v_scale)) else HEAD_SCALES


def problem_of(sample: Sample) -> PagedArgs:
    """The raw arguments of a sample of either op: (q, k_cache, v_cache[, cu_seqlens_q], lengths) and options."""
    options, (q, k_cache, v_cache, *starts, lengths) = sample.kwargs, sample.args
    cache = Cache(k_cache, v_cache, lengths, options.get("block_table"), starts[0] if starts else None)
    names = ("window", "scale", "softcap", "sinks", "k_scale", "v_scale")
    chosen = Options(options.get("causal", True), *(options.get(name) for name in names))
    return raw_arguments("fmha_paged" if starts else "fmha_decode", q.reshape(-1, *q.shape[-2:]), cache, chosen)
