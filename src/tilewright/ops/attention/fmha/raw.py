"""The raw ops of `fmha`, forward and backward, and what the forward saves for the backward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Gradient, RawOp
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.raw import OutputSpec
from tilewright.mask.packed import PACKED_PROGRAM
from tilewright.ops.attention.layout import addressable, dense, spec_like
from tilewright.ops.attention.reference import attention, attention_backward
from tilewright.ops.rows import accumulate_dtype

BUCKET = ("BH", "group", "S_q", "S_k", "D", "D_v", "mask", "extras", "aligned")
"""What a choice of kernel may depend on, in both directions; BH, S_q and S_k in powers of two."""

FULL, CAUSAL, BAND, PROGRAM, PACKED = range(5)
"""`mask` in a bucket.  FULL, CAUSAL and BAND are bands; CAUSAL is bottom right: the last query sees the last key.
PACKED is a program of packed sequences and nothing else, which only backwards tell apart; PROGRAM is any other.
"""

SOFTCAP, SLOPES, SINKS = 1, 2, 4
"""Bits of `extras` in a bucket."""

_TENSORS = "Tensor? sinks, Tensor? slopes, Tensor? mask_data"
_SCALARS = "str program, int left, int right, float scale, float softcap"


def why_not_addressable(bucket: Sequence[int]) -> str | None:
    """Why a kernel that loads by TMA cannot take calls of this bucket, or None if it can."""
    sizes = dict(zip(BUCKET, bucket, strict=True))
    if not sizes["S_k"]:
        return "has no keys to read"
    if not sizes["aligned"]:
        return "needs addresses and strides of q, k and v, and of do and o, that are multiples of 16 bytes"
    return None


def why_not_band(bucket: Sequence[int]) -> str | None:
    """Why a kernel that knows only bands cannot take calls of this bucket, or None if it can."""
    program = bucket[BUCKET.index("mask")] in (PROGRAM, PACKED)
    return "has causal masks and windows; others are programs, which triton evaluates" if program else None


def why_not_interval(bucket: Sequence[int]) -> str | None:
    """Why a kernel of bands and packed sequences cannot take calls of this bucket, or None if it can."""
    if bucket[BUCKET.index("mask")] != PROGRAM:
        return None
    return "has causal masks, windows and packed sequences; others are programs, which triton evaluates"


def bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[int, ...]:
    """The bucket of a forward, named by `BUCKET`."""
    return _bucket((q, k, v), sinks, slopes, _mask(program, left, right), softcap)


def _bucket(
    tensors: Sequence[Tensor],
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask: int,
    softcap: float,
) -> tuple[int, ...]:
    """The bucket of a call.  tensors: q, k, v, and what else the kernel reads."""
    q, k, v = tensors[:3]
    heads, s_k = hint(q.shape[1]), hint(k.shape[2])
    extras = (SOFTCAP if softcap else 0) | (SLOPES if slopes is not None else 0) | (SINKS if sinks is not None else 0)
    return (
        row_bucket(hint(q.shape[0]) * heads),
        heads // max(hint(k.shape[1]), 1),
        row_bucket(q.shape[2]),
        row_bucket(s_k) if s_k else 0,
        hint(q.shape[3]),
        hint(v.shape[3]),
        mask,
        extras,
        int(all(map(addressable, tensors))),
    )


def _mask(program: str, left: int, right: int) -> int:
    if program:
        return PROGRAM
    if left < 0 and right < 0:
        return FULL
    return CAUSAL if left < 0 and right == 0 else BAND


def _backward_bucket(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[int, ...]:
    mask = PACKED if program == PACKED_PROGRAM else _mask(program, left, right)
    return _bucket((q, k, v, do, o), sinks, slopes, mask, softcap)


def _outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[OutputSpec, ...]:
    """o has the memory order of q; lse is (B, H, S_q) contiguous."""
    return spec_like(q, v.shape[3]), (tuple(q.shape[:3]), accumulate_dtype(q.dtype))


def _gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[OutputSpec, ...]:
    """Each gradient has the memory order of its operand; without sinks dsinks is empty."""
    dsinks_spec = ((0,), lse.dtype) if sinks is None else (tuple(sinks.shape), sinks.dtype)
    return spec_like(q, q.shape[3]), spec_like(k, k.shape[3]), spec_like(v, v.shape[3]), dsinks_spec


def _save(args: Sequence[Any], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """All six tensors of the forward, then both results."""
    return (*args[:6], *outputs)


def _raw_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    q, k, v, sinks, slopes, mask_data, o, lse = saved
    do, dlse = grads
    # Kernels take do in the operands' dtype with dense rows
    do = torch.zeros_like(o) if do is None else dense(do.to(o.dtype))
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    return do, dlse, q, k, v, o, lse, sinks, slopes, mask_data, *args[6:]


def _in_one_kernel(sizes: Mapping[str, int]) -> bool:
    """True if torch has a fused kernel for it, cuDNN or FLASH.  Without one it holds all scores in memory, and is 36 to
    1470 times slower on an H200 (softcap, documents).
    """
    return sizes["mask"] in (FULL, CAUSAL) and not sizes["extras"] & (SOFTCAP | SLOPES)


def _torch_first(bucket: tuple[int, ...], dtype: torch.dtype, first: str) -> bool:
    """Whether torch comes first while no table has the sizes.  On an H200 CUDA C++ was faster than cuDNN in 109 of 113
    sizes of 257 queries and more, on and off the bench's grid, and in all 104 that it gets here: all but causal ones of
    D = 64 and up to 1024 queries.
    """
    sizes = dict(zip(BUCKET, bucket, strict=True))
    short = 1024 if sizes["D"] <= 64 and sizes["mask"] == CAUSAL else 256
    vendor_faster = first != "cuda" or sizes["S_q"] <= short
    return dtype.itemsize == 4 or (_in_one_kernel(sizes) and vendor_faster)


_KEYS = 128  # of a key tile
_FULL_GPU = 256
"""Tiles of keys of all heads, in a bucket: up to twice too many, and an H200 has 132 multiprocessors."""


def _torch_first_backward(bucket: tuple[int, ...], dtype: torch.dtype, first: str) -> bool:
    """Whether torch comes first while no table has the sizes.  On an H200 CUDA C++ was faster than cuDNN where the mask
    is causal or D up to 96, no heads are grouped, and key tiles fill the GPU (33 of 34 sizes, the other 0.97 times as
    fast); and 1.8 times as fast where a causal mask has more keys than queries, which torch gives to FLASH (two sizes).
    """
    sizes = dict(zip(BUCKET, bucket, strict=True))
    tiles = sizes["BH"] // sizes["group"] * (sizes["S_k"] // _KEYS)
    cuda_faster = sizes["group"] == 1 and tiles >= _FULL_GPU and (sizes["mask"] == CAUSAL or sizes["D"] <= 96)
    longer = sizes["mask"] == CAUSAL and sizes["S_k"] > sizes["S_q"]
    vendor_faster = first != "cuda" or sizes["S_q"] <= (256 if longer else 512) or not (cuda_faster or longer)
    return dtype.itemsize == 4 or (_in_one_kernel(sizes) and vendor_faster)


FORWARD = RawOp(
    "fmha",
    "fwd",
    f"Tensor q, Tensor k, Tensor v, {_TENSORS}, {_SCALARS}",
    package="tilewright.ops.attention.fmha",
    outputs=_outputs,
    reference=attention,
    bucket=bucket,
    bucket_names=BUCKET,
    count=2,
    torch_first=_torch_first,
)
BACKWARD = RawOp(
    "fmha",
    "bwd",
    f"Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_TENSORS}, {_SCALARS}",
    package="tilewright.ops.attention.fmha",
    outputs=_gradients,
    reference=attention_backward,
    bucket=_backward_bucket,
    bucket_names=BUCKET,
    count=4,
    torch_first=_torch_first_backward,
)
GRADIENT = Gradient(BACKWARD, inputs=(0, 1, 2, 3), save=_save, raw_args=_raw_args, recomputes=False)
"""Gradients of q, k, v and sinks."""
