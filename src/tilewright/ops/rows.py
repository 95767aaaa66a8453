"""Shared by row-wise ops: a tensor (..., N) as rows (M, N), checks, random tensors."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def as_rows(x: Tensor) -> Tensor:
    """`x` (..., N) as (M, N) with unit stride in the last dimension; a view where possible."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def contiguous(vector: Tensor | None) -> Tensor | None:
    """`vector` with unit stride; None stays None."""
    return None if vector is None else vector.contiguous()


class RowsBucket(NamedTuple):
    """The tuning key of a row-wise op: rows rounded up to a power of two, row length."""

    M: int
    N: int


def rows_bucket(x: Tensor) -> RowsBucket:
    """The bucket of `x` (..., N).  Empty rows count as one element: nothing is launched for them."""
    n = x.shape[-1]
    return RowsBucket(row_bucket(x.numel() // n if n != 0 else 1), max(1, hint(n)))


class PlainRowsBucket(NamedTuple):
    """RowsBucket, and plain: 1 for a call without the options that only some kernels take."""

    M: int
    N: int
    plain: int


def plain_rows_bucket(x: Tensor, plain: bool) -> PlainRowsBucket:
    """The bucket of `x` (..., N), as `rows_bucket`, and whether the call is plain."""
    return PlainRowsBucket(*rows_bucket(x), int(plain))


def address(t: Tensor) -> int:
    """Where `t` begins; tensors without memory (fake, meta, wrapped by functorch) count from the start of a storage."""
    if t.is_meta or is_fake(t) or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return hint(t.storage_offset()) * t.element_size()
    return t.data_ptr()


def whole_vectors(t: Tensor, vector: int = 16) -> bool:
    """Is `t` one run of memory, in the order of its dimensions, of whole and aligned vectors of so many bytes?"""
    size = t.element_size()
    for n, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if hint(n) != 1 and hint(stride) * t.element_size() != size:
            return False
        size *= hint(n)
    return size % vector == 0 and address(t) % vector == 0


def no_float64(*args: object) -> str | None:
    """Why an implementation that computes in float32 cannot run: an argument is float64.  Else None."""
    has_float64 = any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)
    return "has no float64" if has_float64 else None


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a reference computes in: float32 for 16-bit dtypes, else `dtype` itself (so float64 is an oracle)."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def check_floating(op: str, **tensors: Tensor) -> None:
    """Raise InputError unless every tensor is floating point, has a dimension, and all are on one device."""
    first = next(iter(tensors.values()))
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dtype not in FLOATS:
            raise InputError(f"{op}: {name} is {t.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
        if t.dim() == 0:
            raise InputError(f"{op}: {name} has no dimensions; needs (..., N).")
        if t.device != first.device:
            raise InputError(
                f"{op}: {name} is on {t.device}, the first tensor on {first.device}. Move them to one device."
            )


def check_same(op: str, **tensors: Tensor) -> None:
    """Raise InputError unless all tensors have one shape and dtype."""
    (first_name, first), *others = tensors.items()
    for name, t in others:
        if t.shape != first.shape or t.dtype != first.dtype:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)} {t.dtype}, {first_name} is {tuple(first.shape)} {first.dtype}; "
                "they must have one shape and dtype."
            )


def check_vector(op: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Raise InputError unless every vector is None or (N,), with N the last dimension of x."""
    for name, v in vectors.items():
        if v is not None and (v.dim() != 1 or v.shape[0] != x.shape[-1]):
            raise InputError(
                f"{op}: {name} is {tuple(v.shape)}; needs ({x.shape[-1]},), the last dimension of x {tuple(x.shape)}."
            )


def random_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """Normal values.  Small tensors are drawn on the CPU, so that every device gets the same values; large ones on
    `device`.
    """
    if math.prod(shape) > 1 << 22 and device.type == "cuda":
        seed = int(torch.randint(2**31, (), generator=generator))
        normal = torch.randn(tuple(shape), device=device, generator=torch.Generator(device).manual_seed(seed))
    else:
        normal = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
    return (normal * scale if scale != 1.0 else normal).to(device=device, dtype=dtype)


def generator(seed: int) -> torch.Generator:
    """A seeded CPU generator."""
    return torch.Generator().manual_seed(seed)


def nbytes(*tensors: Any) -> int:
    """Bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
