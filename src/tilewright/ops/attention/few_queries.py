"""Few queries behind many keys: calls of `fmha` and `fmha_varlen` for the kernels of attention over a KV cache.

A kernel for prefill gives a tile of queries to one program, which walks over all of the keys: of one decoding step
with eight heads, eight programs work.  Those of a cache divide the keys (`fmha_decode`).  Keys of `fmha` are a cache
of B sequences.  Packed keys are one, whose pages overlap: a page begins at every token, and a query's only page is the
first key that it sees; so each query is a sequence, of as many keys as it sees, under any band.
"""

import torch

from tilewright.ops.attention.bucket import (
    BAND,
    CAUSAL,
    FULL,
    LEAST_KEYS,
    MOST_QUERIES,
    PROGRAM,
    SLOPES,
    FmhaBucket,
    VarlenBucket,
)
from tilewright.ops.attention.kernels.sm90 import decode_choice
from tilewright.ops.attention.paged.args import AS_QUERIES, PagedBucket

_LEAST_MEAN = 64
"""Keys of a packed sequence on average: fewer are read sooner than a second kernel starts."""
_MOST_READ = 1 << 13
_MOST_SEQUENCES = 4096  # of the kernels


def why_not(bucket: FmhaBucket | VarlenBucket) -> str | None:
    """Why a call of this bucket is left to the kernels for prefill, or None if it has few queries behind many keys.

    Packed queries of one sequence read its keys one after another, each for itself.  The kernel for prefill takes 16 ns
    for each packed key, whichever query sees it (an H100, D = 128).  Then memory delivers 48 KB, and a query of each
    head needs 4 * D bytes: two thirds of that are `_MOST_READ` numbers.
    """
    if bucket.extras & SLOPES:
        return "has no slopes (alibi)"
    if bucket.S_k < LEAST_KEYS:
        return f"is for {LEAST_KEYS} keys and more"
    heads = bucket.BH // bucket.group
    if isinstance(bucket, VarlenBucket):
        few = bucket.each <= MOST_QUERIES and bucket.S_k * bucket.each >= _LEAST_MEAN * bucket.S_q
        few = few and (bucket.each == 1 or bucket.each * heads * bucket.D <= _MOST_READ)
        sequences, masked = bucket.S_q, bucket.mask == PROGRAM
    else:
        few, sequences, masked = bucket.S_q <= MOST_QUERIES, heads, bucket.mask in (FULL, CAUSAL, BAND)
    if not masked:
        return f"has causal masks, and windows of {LEAST_KEYS} keys and more before a query"
    if not few or sequences > _MOST_SEQUENCES:
        return f"is for up to {_MOST_SEQUENCES} sequences of up to {MOST_QUERIES} queries and more keys"
    return None


def as_paged(bucket: FmhaBucket | VarlenBucket) -> PagedBucket:
    """The bucket of the same problem over a cache.  Heads of keys count as sequences: a bucket has their product.

    Of packed sequences it is the mean, and each query a sequence.
    """
    heads = bucket.BH // bucket.group
    packed = isinstance(bucket, VarlenBucket)
    sequences, each = (heads * bucket.S_q, 1) if packed else (heads, bucket.S_q)
    keys = bucket.S_k * bucket.each // bucket.S_q if isinstance(bucket, VarlenBucket) else bucket.S_k
    return PagedBucket(
        B=sequences,
        T=sequences * each,
        keys=keys,
        S_q=each,
        H_kv=1,
        group=bucket.group,
        D=bucket.D,
        D_v=bucket.D_v,
        page=256 if packed else 0,
        cache=AS_QUERIES,
        extras=bucket.extras,
        aligned=bucket.aligned,
    )


def as_row_tiles(bucket: FmhaBucket | VarlenBucket) -> PagedBucket:
    """The same for the kernel in CUDA C++.  Of a sequence with more rows than a row tile holds each tile counts as one:
    it reads the keys again, which then are in the L2.

    Packed sequences get equal shares: in clusters a short one has as many blocks as a long one.
    """
    paged = as_paged(bucket)
    most = min(decode_choice.MOST_SUMS // max(paged.D, 1), decode_choice.ROWS[-1])
    rows = paged.S_q * paged.group
    if rows > most:
        tiles = paged.B * -(-rows // most)
        paged = paged._replace(B=tiles, T=tiles, S_q=1, group=most)
    return paged._replace(S_q=0) if isinstance(bucket, VarlenBucket) else paged


def why_not_in_cuda(bucket: FmhaBucket | VarlenBucket, dtype: torch.dtype) -> str | None:
    """Why the kernel in CUDA C++ cannot compute 16-bit calls of this bucket, or None if it can."""
    reason = why_not(bucket)
    if reason is not None:
        return reason
    if not bucket.aligned:
        return "needs addresses and strides of q, k and v that are multiples of 16 bytes"
    if bucket.D_v != bucket.D or not decode_choice.candidates(as_row_tiles(bucket), dtype):
        widths = ", ".join(map(str, decode_choice.WIDTHS))
        return f"has D = D_v of {widths}, got D={bucket.D}, D_v={bucket.D_v}"
    return None
