"""Run cuTile kernels on a CPU, block after block, with torch tensors for tiles.

    with emulated():
        implementation.launch(outs, *args, config=config)       # the implementation's own host code and kernels

cuda.tile has no interpreter.  A kernel is a Python function over the global `ct`, so another `ct` makes it run: the
part of the language that our kernels use, with its rules.  An index outside an array reads the padding, and is an
error where the kernel promised that there is none.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tilewright.jit.cutile_launch import CutileKernel

_block = [0, 0, 0]
_grid = [1, 1, 1]


class Tile:
    """A tile: torch's arithmetic, cuTile's names."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def astype(self, dtype: torch.dtype) -> "Tile":
        return Tile(self.values.to(dtype))

    def reshape(self, shape: tuple[int, ...]) -> "Tile":
        return Tile(self.values.reshape(shape))

    def extract(self, index: tuple[int, ...], shape: tuple[int, ...]) -> "Tile":
        part = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, shape, strict=True))
        return Tile(self.values[part])

    def __getitem__(self, index: Any) -> "Tile":
        return Tile(self.values[index])

    def __neg__(self) -> "Tile":
        return Tile(-self.values)

    def __abs__(self) -> "Tile":
        return Tile(self.values.abs())


def _binary(name: str) -> Any:
    def apply(self: Tile, other: Any) -> Tile:
        plain = other.values if isinstance(other, Tile) else other
        if isinstance(other, Tile) and other.dtype != self.dtype:
            raise TypeError(f"{self.dtype} and {other.dtype}: our kernels convert first")
        return Tile(getattr(self.values, name)(plain))

    return apply


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "mod",
    "lt",
    "le",
    "ge",
    "eq",
    "floordiv",
):
    setattr(Tile, f"__{_name}__", _binary(f"__{_name}__"))


class Language:
    """Stands for `ct`."""

    float32, float16, bfloat16, int32 = torch.float32, torch.float16, torch.bfloat16, torch.int32
    RoundingMode = Enum("RoundingMode", ["APPROX"])
    PaddingMode = Enum("PaddingMode", ["ZERO"])

    @staticmethod
    def bid(axis: int) -> int:
        return _block[axis]

    @staticmethod
    def num_blocks(axis: int) -> int:
        return _grid[axis]

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def arange(size: int, *, dtype: torch.dtype) -> Tile:
        return Tile(torch.arange(_power_of_two(size), dtype=dtype))

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tile:
        return Tile(torch.full(tuple(map(_power_of_two, shape)), value, dtype=dtype))

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tile:
        return Language.full(shape, 0, dtype)

    @staticmethod
    def broadcast_to(x: Tile, shape: tuple[int, ...]) -> Tile:
        return Tile(x.values.broadcast_to(shape))

    @staticmethod
    def cat(tiles: tuple[Tile, Tile], axis: int) -> Tile:
        return Tile(torch.cat([t.values for t in tiles], dim=axis))

    @staticmethod
    def sum(x: Tile, axis: int | None = None, *, keepdims: bool = False) -> Tile:
        return Tile(x.values.sum() if axis is None else x.values.sum(axis, keepdim=keepdims))

    @staticmethod
    def max(x: Tile, axis: int | None = None, *, keepdims: bool = False) -> Tile:
        numbers = torch.where(x.values.isnan(), -math.inf, x.values)  # NaN is passed over, as on the GPU
        return Tile(numbers.max() if axis is None else numbers.amax(axis, keepdim=keepdims))

    @staticmethod
    def maximum(x: Tile, y: Any) -> Tile:
        return Tile(torch.fmax(x.values, y.values if isinstance(y, Tile) else torch.tensor(y, dtype=x.dtype)))

    @staticmethod
    def where(condition: Tile, x: Any, y: Any) -> Tile:
        first, second = (v.values if isinstance(v, Tile) else v for v in (x, y))
        return Tile(torch.where(condition.values, first, second))

    @staticmethod
    def extract(x: Tile, index: tuple[int, ...], shape: tuple[int, ...]) -> Tile:
        return x.extract(index, shape)

    @staticmethod
    def transpose(x: Tile) -> Tile:
        return Tile(x.values.mT)

    @staticmethod
    def mma(x: Tile, y: Tile, acc: Tile, *, use_fast_acc: bool = False) -> Tile:
        if x.dtype != y.dtype or acc.dtype != torch.float32:
            raise TypeError(f"mma of {x.dtype} and {y.dtype} into {acc.dtype}: ours add up in float32")
        if use_fast_acc and x.dtype != torch.float8_e4m3fn:
            raise TypeError(f"mma with use_fast_acc of {x.dtype}: only float8 has it")
        return Tile(acc.values + x.values.float() @ y.values.float())

    @staticmethod
    def static_iter(items: Any) -> Any:
        return items

    @staticmethod
    def rsqrt(x: Tile) -> Tile:
        return Tile(x.values.rsqrt())

    @staticmethod
    def exp(x: Tile) -> Tile:
        return Tile(x.values.exp())

    @staticmethod
    def exp2(x: Tile, *, flush_to_zero: bool) -> Tile:
        return Tile(x.values.exp2())

    @staticmethod
    def log2(x: Tile) -> Tile:
        return Tile(x.values.log2())

    @staticmethod
    def tanh(x: Tile, *, rounding_mode: Any) -> Tile:
        return Tile(x.values.tanh())

    @staticmethod
    def abs(x: Tile) -> Tile:
        return abs(x)

    @staticmethod
    def truediv(x: Any, y: Tile, *, rounding_mode: Any, flush_to_zero: bool) -> Tile:
        return Tile((x.values if isinstance(x, Tile) else x) / y.values)

    @staticmethod
    def load(
        array: Tensor,
        index: tuple[int, ...],
        shape: tuple[int, ...],
        *,
        order: tuple[int, ...] | None = None,
        padding_mode: Any = None,
        allow_tma: bool = True,
    ) -> Tile:
        """The array's axes are permuted by `order` before it is cut into tiles; outside is what `padding_mode` says."""
        if shape == ():
            return Tile(array[index])
        view = array if order is None else array.permute(order)
        corner = _corner(view, index, shape)
        part = view[tuple(slice(c, c + n) for c, n in zip(corner, shape, strict=True))]
        if padding_mode is None and part.shape != torch.Size(shape):
            raise IndexError(f"tile {index} of {tuple(view.shape)} is ragged, and no padding is asked for")
        full = torch.zeros(shape, dtype=array.dtype)
        full[tuple(map(slice, part.shape))] = part
        return Tile(full)

    @staticmethod
    def store(array: Tensor, index: tuple[int, ...], tile: Tile, *, allow_tma: bool = True) -> None:
        if tile.dtype != array.dtype:
            raise TypeError(f"a {tile.dtype} tile is written to a {array.dtype} array: our kernels convert first")
        corner = _corner(array, index, tile.shape)
        part = array[tuple(slice(c, c + n) for c, n in zip(corner, tile.shape, strict=True))]
        part.copy_(tile.values[tuple(map(slice, part.shape))])

    @staticmethod
    def gather(
        array: Tensor, indices: Any, *, mask: Tile | None = None, padding_value: float = 0, check_bounds: bool = True
    ) -> Tile:
        places, inside = _places(array, indices, mask, check_bounds)
        padding = torch.tensor(padding_value, dtype=array.dtype)
        return Tile(torch.where(inside, array[places], padding))

    @staticmethod
    def scatter(
        array: Tensor, indices: Any, value: Tile, *, mask: Tile | None = None, check_bounds: bool = True
    ) -> None:
        if value.dtype != array.dtype:
            raise TypeError(f"a {value.dtype} tile is written to a {array.dtype} array: our kernels convert first")
        places, inside = _places(array, indices, mask, check_bounds)
        where = tuple(p[inside] for p in places)
        array[where] = value.values.broadcast_to(inside.shape)[inside]


def _corner(array: Tensor, index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """First element of a tile.  One that lies outside altogether is an error, as it is undefined on a GPU."""
    corner = tuple(i * _power_of_two(n) for i, n in zip(index, shape, strict=True))
    if any(not 0 <= c < size for c, size in zip(corner, array.shape, strict=True)):
        raise IndexError(f"tile {index} of {shape} begins outside an array of {tuple(array.shape)}")
    return corner


def _places(array: Tensor, indices: Any, mask: Tile | None, check_bounds: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """Index tensors of one shape, 0 where outside, and which are inside."""
    given = indices if isinstance(indices, tuple) else (indices,)
    if len(given) != array.dim():
        raise TypeError(f"{len(given)} indices into an array of {array.dim()} dimensions")
    plain = [i.values.long() if isinstance(i, Tile) else torch.tensor(i) for i in given]
    whole = torch.broadcast_tensors(*plain, *([mask.values] if mask is not None else []))
    inside = whole[-1].clone() if mask is not None else torch.ones(whole[0].shape, dtype=torch.bool)
    for i, size in zip(whole, array.shape, strict=False):
        if not check_bounds and bool((inside & ~((i >= 0) & (i < size))).any()):
            raise IndexError(f"check_bounds=False, but an index reaches {int(i.max())} of {size}")
        inside &= (i >= 0) & (i < size)
    return tuple(torch.where(inside, i, 0) for i in whole[: array.dim()]), inside


def _power_of_two(size: int) -> int:
    if size < 1 or size & (size - 1):
        raise TypeError(f"a tile of {size} elements; sizes are powers of two")
    return size


def _modules(fn: FunctionType, found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The globals of `fn` and of every function that it uses: files of kernels share functions."""
    if id(fn.__globals__) not in found:
        found[id(fn.__globals__)] = fn.__globals__
        for value in fn.__globals__.copy().values():
            if isinstance(value, FunctionType) and "ct" in value.__globals__:
                _modules(value, found)
    return found


def _run(kernel: CutileKernel, grid: tuple[int, ...], args: Any, constants: Any, hints: Any) -> None:
    _grid[:] = (*grid, 1, 1)[:3]
    with ExitStack() as stack:
        for names in _modules(kernel.fn, {}).values():
            stack.enter_context(mock.patch.dict(names, {"ct": Language}))
        for place in itertools.product(*map(range, grid)):
            _block[:] = (*place, 0, 0)[:3]
            kernel.fn(*args, *constants)


@contextmanager
def emulated() -> Iterator[None]:
    """Within the block every `CutileKernel` runs here."""
    with mock.patch.object(CutileKernel, "__call__", _run):
        yield
