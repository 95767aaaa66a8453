"""Arguments of the raw op of `mla_decode`, from those of a public call, and their bucket."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.preference import current_numerics
from tilewright.jit.tensor_map import plain_strides
from tilewright.ops.attention.arguments import of_heads
from tilewright.ops.attention.bucket import SINKS
from tilewright.ops.attention.layout import addressable, readable
from tilewright.ops.attention.mla_decode.checks import check_tensors

OP = "mla_decode"
AS_QUERIES, PACKED = range(2)
"""`cache` in a bucket: in the dtype of the queries, or tokens of 656 bytes."""
_WIDEST_PAGE = 256


class MlaDecodeArgs(NamedTuple):
    """Arguments of the forward."""

    q: Tensor  # (B, S_q, H, D), unit last stride
    kv_cache: Tensor  # (pages, page_size, D) in q's dtype, or uint8 (pages, page_size, 656); unit last stride
    lengths: Tensor | None  # (B,) int32; None only beside indices
    block_table: Tensor | None  # (B, max_pages) int32, unit last stride; None: page b is sequence b
    indices: Tensor | None  # (B, S_q, topk) int32 slots, contiguous; with them there is no block_table
    sinks: Tensor | None  # (H,) float32
    d_v: int  # leading columns of a token that are its value
    causal: bool  # False beside indices, which say what each token sees
    scale: float
    batch_invariant: bool  # may the other sequences decide how the keys of one are split?

    @property
    def capacity(self) -> int:
        """The most keys that a token can see: slots of its sequence, or its indices."""
        if self.indices is not None:
            return self.indices.shape[2]
        page_size = self.kv_cache.shape[1]
        return page_size if self.block_table is None else self.block_table.shape[1] * page_size

    @property
    def is_packed(self) -> bool:
        """Are tokens stored in 656 bytes?"""
        return self.kv_cache.dtype == torch.uint8

    @property
    def has_merged_rows(self) -> bool:
        """Have the query rows that share keys one stride?  Those of a sequence; beside indices, of a token, whose
        tokens then follow one another.
        """
        tokens = self.q.shape[1]
        outer, inner = (0, 1) if self.indices is not None else (1, 2)
        return tokens == 1 or self.q.stride(outer) == self.q.shape[inner] * self.q.stride(inner)

    @property
    def is_gathered(self) -> bool:
        """Are tokens single rows for a kernel, and not pages of a matrix?"""
        return self.is_packed or self.indices is not None

    @property
    def is_near(self) -> bool:
        """Do single rows lie within 64 GiB, as far as their addresses reach?"""
        if not self.is_gathered:
            return True
        cache = self.kv_cache
        spanned = sum((n - 1) * stride for n, stride in zip(cache.shape, plain_strides(cache), strict=True))
        return spanned * cache.itemsize < 1 << 36


class MlaDecodeBucket(NamedTuple):
    """The tuning key."""

    B: int  # sequences, rounded up to a power of two, as keys
    S_q: int
    keys: int  # capacity of a sequence, or indices of a token
    H: int
    D: int
    D_v: int
    page: int  # tokens of a page, at most 256; 0 for contiguous caches and for indices
    cache: int
    sparse: int  # 1 with indices
    extras: int
    aligned: int  # 1 if vector loads can address every row
    plain: int  # 1 for a positive scale, merged query rows and a near cache


BATCH_FIELDS = ("B", "keys")
"""What `numerics("batch_invariant")` ignores: a table is as wide as the longest sequence needs."""


def raw_arguments(
    q: Tensor,
    kv_cache: Tensor,
    lengths: Tensor | None,
    block_table: Tensor | None,
    indices: Tensor | None,
    d_v: int,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None,
) -> MlaDecodeArgs:
    """Arguments of the raw op.  Raises InputError for what cannot be made into them."""
    check_tensors(OP, q, kv_cache, lengths, block_table, indices)
    q = q.unsqueeze(1) if q.dim() == 3 else q
    kv_cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    if kv_cache.dtype == torch.float8_e4m3fn:
        kv_cache = kv_cache.view(torch.uint8)
    if scale is None:
        scale = float(q.shape[-1]) ** -0.5 if q.shape[-1] else 1.0
    return MlaDecodeArgs(
        readable(q), readable(kv_cache),
        None if lengths is None else lengths.contiguous(),
        None if block_table is None else readable(block_table),
        None if indices is None else indices.contiguous(),
        of_heads(sinks, q), d_v, bool(causal) and indices is None,
        float(scale) if isinstance(scale, int) else scale,
        current_numerics() == "batch_invariant",
    )  # fmt: skip


def bucket(args: MlaDecodeArgs) -> MlaDecodeBucket:
    """The bucket of a call."""
    q, cache = args.q, args.kv_cache
    return MlaDecodeBucket(
        B=row_bucket(q.shape[0]),
        S_q=hint(q.shape[1]),
        keys=row_bucket(args.capacity),
        H=hint(q.shape[2]),
        D=hint(q.shape[3]),
        D_v=args.d_v,
        page=0 if args.block_table is None else min(hint(cache.shape[1]), _WIDEST_PAGE),
        cache=PACKED if args.is_packed else AS_QUERIES,
        sparse=int(args.indices is not None),
        extras=SINKS if args.sinks is not None else 0,
        aligned=int(addressable(q) and addressable(cache)),
        plain=int(args.scale > 0 and args.has_merged_rows and args.is_near),
    )


def problem_of(sample: Sample) -> MlaDecodeArgs:
    """The raw arguments of a sample: (q, kv_cache, lengths) and options."""
    q, kv_cache, lengths = sample.args
    options = sample.kwargs
    return raw_arguments(
        q, kv_cache, lengths, options.get("block_table"), options.get("indices"), options.get("d_v", 512),
        options.get("causal", True), options.get("scale"), options.get("sinks"),
    )  # fmt: skip
