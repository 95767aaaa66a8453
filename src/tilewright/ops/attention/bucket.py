"""Buckets of `fmha`, which the other ops of this family extend: what a choice of kernel may depend on."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.mask.packed import PACKED_PROGRAMS
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs, MaskArgs, VarlenArgs
from tilewright.ops.attention.layout import addressable

FULL, CAUSAL, BAND, PROGRAM, PACKED, AHEAD, NARROW = range(7)
"""`mask` in a bucket.  FULL, CAUSAL, BAND, AHEAD and NARROW are bands; CAUSAL is bottom right: the last query sees the
last key.  AHEAD has a bound of the keys after a query's position; a BAND has none of these, or all.  NARROW is a BAND
of few queries that shows each fewer keys than repay a kernel that divides them.
A causal mask that no kernel of torch has is a BAND, which our kernels treat alike: of fewer keys than queries, where
some see nothing; and of another number of keys where heads of values have another width, which is cuDNN's alone.
PACKED is a program of packed sequences and nothing else, which only backwards tell apart; PROGRAM is any other.
"""

SOFTCAP, SLOPES, SINKS = 1, 2, 4
"""Bits of `extras` in a bucket."""


_FEW_SCORES, _FEW_KEYS = 1 << 18, 1024
_FEW_ELEMENTS, _FEW_PRODUCTS = 1 << 15, 1 << 26
_WIDEST = 256  # heads of FLASH and cuDNN
_MANY = 16  # queries of a sequence that no kernel for few takes
MOST_QUERIES, LEAST_KEYS = 8, 1024
"""Most queries and fewest keys of a sequence for the kernels that divide keys."""


class FmhaBucket(NamedTuple):
    """The tuning key, in both directions."""

    BH: int  # batch times query heads, rounded up to a power of two, as S_q and S_k
    group: int  # query heads of a key head
    S_q: int
    S_k: int
    D: int
    D_v: int
    mask: int
    extras: int
    aligned: int  # 1 if TMA and vector loads can address every tensor


class VarlenBucket(NamedTuple):
    """The tuning key of the forward of `fmha_varlen`: the fields of `FmhaBucket`, and one more."""

    BH: int
    group: int
    S_q: int
    S_k: int
    D: int
    D_v: int
    mask: int
    extras: int
    aligned: int
    each: int  # queries of a sequence on average, rounded up to a power of two, at most `_MANY`


def forward_bucket(args: FmhaArgs) -> FmhaBucket:
    """The bucket of a forward."""
    mask = causal_kind(mask_kind(args.mask), args.q, args.k, args.q.shape[3], args.v.shape[3])
    if mask == BAND and 0 <= args.mask.left < LEAST_KEYS and hint(args.q.shape[2]) <= MOST_QUERIES:
        mask = NARROW
    return _bucket(args, mask, (args.q, args.k, args.v))


def varlen_bucket(args: VarlenArgs) -> VarlenBucket:
    """The bucket of a forward of packed sequences."""
    each = -(-hint(args.q.shape[2]) // max(hint(args.sequences), 1))
    return VarlenBucket(*forward_bucket(args.fmha), min(row_bucket(each), _MANY))


def backward_bucket(args: FmhaBackwardArgs) -> FmhaBucket:
    """The bucket of a backward."""
    kind = causal_kind(mask_kind(args.mask), args.q, args.k, args.q.shape[3], args.v.shape[3])
    mask = PACKED if args.program in PACKED_PROGRAMS else kind
    return _bucket(args.forward, mask, (args.q, args.k, args.v, args.do, args.o))


def _bucket(args: FmhaArgs, mask: int, tensors: tuple[Tensor, ...]) -> FmhaBucket:
    """tensors: those that a kernel reads by rows."""
    q, k, v = args.q, args.k, args.v
    heads, s_k = hint(q.shape[1]), hint(k.shape[2])
    bits = {SOFTCAP: bool(args.softcap), SLOPES: args.slopes is not None, SINKS: args.sinks is not None}
    return FmhaBucket(
        BH=row_bucket(hint(q.shape[0]) * heads),
        group=heads // max(hint(k.shape[1]), 1),
        S_q=row_bucket(q.shape[2]),
        S_k=row_bucket(s_k) if s_k else 0,
        D=hint(q.shape[3]),
        D_v=hint(v.shape[3]),
        mask=mask,
        extras=sum(bit for bit, present in bits.items() if present),
        aligned=int(all(map(addressable, tensors))),
    )


def mask_kind(mask: MaskArgs) -> int:
    """FULL, CAUSAL, BAND, AHEAD or PROGRAM."""
    if mask.program:
        return PROGRAM
    if mask.left < 0 and mask.right < 0:
        return FULL
    if mask.right > 0:
        return AHEAD
    return CAUSAL if mask.left < 0 and mask.right == 0 else BAND


def causal_kind(kind: int, q: Tensor, k: Tensor, d: int, d_v: int) -> int:
    """`kind`, or BAND for a causal mask that no kernel of torch has.   d, d_v: widths of heads of keys and values."""
    queries, keys = hint(q.shape[2]), hint(k.shape[2])
    lacking = queries > keys or (queries != keys and hint(d) != hint(d_v))
    return BAND if kind == CAUSAL and lacking else kind


def few_scores(batch_heads: int, s_q: int, s_k: int) -> bool:
    """Whether the reference computes so many scores in steps of torch, not in a kernel of cuDNN or FLASH: its backward
    repeats bit for bit, and it rounds where kernels do.  It depends on the numbers of a bucket alone, so that `auto`
    gives such a problem to a kernel of ours.  Of more keys that one program reads, FLASH divides them among programs.
    """
    keys = row_bucket(s_k)
    return keys <= _FEW_KEYS and row_bucket(batch_heads) * row_bucket(s_q) * keys <= _FEW_SCORES


def steps_of_float32(mask: int, batch_heads: int, s_q: int, s_k: int, width: int) -> bool:
    """Whether torch comes first for float32: its products are cuBLAS's, those of Triton FMAs.   width: of a key.

    Not where launches take longer, seventeen forward and more backward, than Triton needs for the keys of a head, which
    one program reads, and for all products; nor where a program hides keys, which torch multiplies and our kernels
    skip.  These are estimates, not measured.
    """
    keys = row_bucket(s_k)
    products = row_bucket(batch_heads) * row_bucket(s_q) * keys * width
    launch_bound = keys * width <= _FEW_ELEMENTS and products <= _FEW_PRODUCTS
    return mask not in (PROGRAM, PACKED) and not launch_bound


def in_one_kernel(mask: int, batch_heads: int, s_q: int, s_k: int, d: int, d_v: int) -> bool:
    """Whether cuDNN or FLASH has a kernel for it: what `vendor.kernels` tells of a call, from the sizes of a bucket."""
    widths = all(width % 8 == 0 and width <= _WIDEST for width in (d, d_v))
    return mask in (FULL, CAUSAL) and widths and not few_scores(batch_heads, s_q, s_k)


def why_not_addressable(bucket: FmhaBucket) -> str | None:
    """Why a kernel that loads by TMA cannot take calls of this bucket, or None if it can."""
    if not bucket.S_k:
        return "has no keys to read"
    if not bucket.aligned:
        return "needs addresses and strides of q, k and v, and of do and o, that are multiples of 16 bytes"
    return None


def why_not_band(bucket: FmhaBucket) -> str | None:
    """Why a kernel that knows only bands cannot take calls of this bucket, or None if it can."""
    program = bucket.mask in (PROGRAM, PACKED)
    return "has causal masks and windows; others are programs, which triton evaluates" if program else None


def why_not_interval(bucket: FmhaBucket) -> str | None:
    """Why a kernel of bands and packed sequences cannot take calls of this bucket, or None if it can."""
    if bucket.mask != PROGRAM:
        return None
    return "has causal masks, windows and packed sequences; others are programs, which triton evaluates"
