"""Checks that all products share, with errors that name the argument as DeepGEMM does."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.errors import InputError
from tilewright.log import log_once
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.quant.layout import BLOCK, TOKEN, ScaleLayout

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
RESULTS = (torch.bfloat16, torch.float32)
Pair = tuple[Tensor, Tensor]
"""e4m3 and the scales of its blocks."""

_SIZES = frozenset("mnk")
_LAYOUTS = {(1, 128): TOKEN, (128, 128): BLOCK}


F = TypeVar("F", bound=Callable[..., Any])


def also(**names: str) -> Callable[[F], F]:
    """Accept arguments by these names too, which other versions of DeepGEMM used."""

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{names.get(key, key): value for key, value in kwargs.items()})

        return cast(F, renamed)

    return wrap


def same_device(name: str, c: Any = None, **tensors: Any) -> None:
    """Raise InputError unless all are tensors on the device of the first; `c` may be None."""
    first_key, first = next(iter(tensors.items()))
    for key, t in (*tensors.items(), *([] if c is None else [("c", c)])):
        if not isinstance(t, Tensor):
            raise InputError(f"{name}: {key} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.device != first.device:
            raise InputError(f"{name}: {key} is on {t.device}, {first_key} on {first.device}. Move them to one device.")


def dimensions(name: str, count: int, **tensors: Tensor) -> None:
    """Raise InputError unless each tensor has `count` dimensions."""
    for key, t in tensors.items():
        if t.dim() != count:
            raise InputError(
                f"{name}: {key} is {tuple(t.shape)}; needs {('one', 'two', 'three')[count - 1]} dimensions."
            )


def operands(name: str, dtype: torch.dtype, a: Tensor, b: Tensor) -> None:
    """Raise InputError unless both have `dtype` and are contiguous along one of their last two dimensions."""
    for key, t in (("a", a), ("b", b)):
        if t.dtype != dtype:
            cast = "Cast it, or call tilewright.ops.matmul" if dtype == BF16 else "Cast it with the casts of utils.math"
            raise InputError(f"{name}: {key} is {t.dtype}; needs {dtype}. {cast}.")
        if 1 not in t.stride()[-2:] and t.numel() > 1:
            raise InputError(
                f"{name}: {key} has strides {tuple(t.stride())}; one has to be 1. Call {key}.contiguous() first."
            )


def same_depth(name: str, a: Tensor, b: Tensor, a_form: str, b_form: str, k: int, k_b: int) -> None:
    """Raise InputError unless both have the same K."""
    if k != k_b:
        raise InputError(
            f"{name}: a is {tuple(a.shape)} {a_form}, b is {tuple(b.shape)} {b_form}; "
            f"K is {k} in one and {k_b} in the other."
        )


def pair(name: str, key: str, value: Any) -> Pair:
    """Split the argument `key` into (data, scales)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f"{name}: {key} is a {type(value).__name__}; needs a pair (float8_e4m3fn, scales).")
    return value[0], value[1]


def granularities(name: str, recipe: Any, recipe_a: Any, recipe_b: Any) -> tuple[ScaleLayout, ScaleLayout]:
    """Layouts of both scale tensors: by `recipe` (rows of a, rows of b, K), by one (rows, K) each, or the default."""
    if (recipe_a is None) != (recipe_b is None) or (recipe is not None and recipe_a is not None):
        raise InputError(f"{name}: needs recipe, or recipe_a and recipe_b, or none of them.")
    if recipe_a is None:
        rows_a, rows_b, depth = recipe or (1, 128, 128)
        recipe_a, recipe_b = (rows_a, depth), (rows_b, depth)
    layouts = _LAYOUTS.get(tuple(recipe_a)), _LAYOUTS.get(tuple(recipe_b))
    if layouts[0] is not TOKEN or layouts[1] is None:
        raise InputError(
            f"{name}: scales of {tuple(recipe_a)} elements of a and {tuple(recipe_b)} of b; Hopper has 1x128 of a with "
            "128x128 of b, recipe (1, 128, 128), or 1x128 of both, recipe (1, 1, 128)."
        )
    return layouts[0], layouts[1]


def scales(name: str, key: str, sf: Any, layout: ScaleLayout, rows: int, depth: int, batch: Sequence[int]) -> None:
    """Raise InputError unless `sf` are float32 scales of the (*batch, rows, depth) operand `key`; strides are free."""
    if sf.dtype == torch.int32:
        raise InputError(
            f"{name}: the scales of {key} are torch.int32, powers of two packed for Blackwell; on Hopper they are "
            "float32. Cast with use_packed_ue8m0=False."
        )
    if sf.dtype != torch.float32:
        raise InputError(f"{name}: the scales of {key} are {sf.dtype}; needs torch.float32.")
    shape = (*batch, *layout.shape(rows, depth))
    if tuple(sf.shape) != shape:
        other = " Scales of 1x128 on both sides go with recipe=(1, 1, 128)." if layout is BLOCK else ""
        raise InputError(
            f"{name}: the scales of {key} are {tuple(sf.shape)}; {layout.rows}x{layout.depth} of "
            f"{(*batch, rows, depth)} are {shape}, transposed where {key} is.{other}"
        )


def laid_out(name: str, key: str, sf: Tensor, layout: ScaleLayout, rows: int, depth: int) -> Tensor:
    """`sf`, the scales of `key`, in the layout of kernels: itself, or a copy, which is logged once."""
    if torch.compiler.is_compiling():  # no addresses and no logs when tracing: the op converts the layout
        return sf
    if layout.mismatch(sf, rows, depth) is None and (layout is not TOKEN or copyable(sf)):
        return sf
    log_once(
        ("compat scales", name, key),
        f"{name}: each call copies the scales of {key} into the layout of kernels. "
        "transform_sf_into_required_layout does it once.",
    )
    return layout.empty(rows, depth, sf.device, *sf.shape[:-2]).copy_(sf)


def no_gradient(name: str, *tensors: Tensor | None) -> None:
    """Raise InputError if a gradient would be lost, as the ops do for `out`."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise InputError(
            f"{name}: writes into d, which has no gradient. Wrap the call in torch.no_grad(), or use tilewright.ops."
        )


def is_settled(name: str, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, k: int) -> bool:
    """True if there is nothing to multiply.  An empty sum, K = 0, is written here: c, or zeros."""
    if not d.numel():
        return True
    if k:
        return False
    no_gradient(name, a, b, c, d)
    if c is None:
        d.zero_()
    else:
        d.copy_(c)
    return True


def result(
    name: str, d: Tensor, shape: Sequence[int], form: str, dtypes: Iterable[torch.dtype] = RESULTS, key: str = "d"
) -> None:
    """Raise InputError unless `d` has this shape, one of these dtypes, and contiguous rows that do not overlap."""
    if tuple(d.shape) != tuple(shape):
        raise InputError(f"{name}: {key} is {tuple(d.shape)}; needs {form} = {tuple(shape)}.")
    if d.dtype not in dtypes:
        raise InputError(f"{name}: {key} is {d.dtype}; needs {' or '.join(map(str, dtypes))}.")
    if not _rows_contiguous(d):
        raise InputError(f"{name}: {key} has strides {tuple(d.stride())}; needs contiguous rows, one after the other.")


def summand(name: str, c: Tensor | None, d: Tensor) -> None:
    """Raise InputError unless `c` has d's shape and dtype and contiguous rows, and is d if it begins at d's address."""
    if c is None:
        return
    if c.shape != d.shape or c.dtype != d.dtype:
        raise InputError(
            f"{name}: c is {tuple(c.shape)} {c.dtype}, d is {tuple(d.shape)} {d.dtype}; they need one shape and dtype."
        )
    if not _rows_contiguous(c):
        raise InputError(f"{name}: c has strides {tuple(c.stride())}; needs contiguous rows, one after the other.")
    if torch.compiler.is_compiling() or is_fake(c) or is_fake(d):  # without addresses
        return
    if c.data_ptr() == d.data_ptr() and c.stride() != d.stride():
        raise InputError(f"{name}: c begins where d does, with strides {c.stride()} and not {d.stride()}. Pass d as c.")


def compiled(name: str, compiled_dims: str) -> None:
    """Raise InputError unless compiled_dims has only letters of "mnk"."""
    if not _SIZES.issuperset(compiled_dims):
        raise InputError(f'{name}: compiled_dims is {compiled_dims!r}; needs letters of "mnk".')


def _rows_contiguous(t: Tensor) -> bool:
    """True if columns have unit stride and no two elements of `t` share an address."""
    if t.numel() == 0:
        return True
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        return False
    if torch.compiler.is_compiling():  # sizes may be symbols, which cannot be sorted; the op that writes checks again
        return True
    end = t.shape[-1]
    for stride, size in sorted((s, n) for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1):
        if stride < end:
            return False
        end = (size - 1) * stride + end
    return True
