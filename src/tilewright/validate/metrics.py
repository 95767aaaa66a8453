"""Measures of a tensor's error; each one sees another kind of fault.

Norms of the full tensor see a loss of precision everywhere; those of rows, columns and 64x64 tiles see one wrong
program of a grid, which the full norm would dilute; ULPs see wrong small values next to large ones. All in float64.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.validate.bits import bits

TILE = 64
_BLOCK = 1 << 24  # elements
CANCELLED = 2.0**-40  # of the typical value: smaller ones are left by terms that cancel in float64; no digit is right


class Errors(NamedTuple):
    """Norms of an error (or of any tensor seen as (M, N)), in its own units; `ulp` counts representable values."""

    frobenius: Tensor  # (): Frobenius norm
    largest: Tensor  # (): largest absolute value
    ulp: Tensor  # (): see `ulp_quantile`
    rows: Tensor  # (M,): norm of each row
    columns: Tensor  # (N,)
    tiles: Tensor  # (ceil(M/64), ceil(N/64)): norm of each 64x64 tile


PARTS = ("rows", "columns", "tiles")


@dataclass(frozen=True)
class Measure:
    """One tensor, judged.  Errors are relative to the exact tensor's norm (`largest`: to its root mean square)."""

    tensor: str
    error: float
    error_torch: float
    largest: float
    largest_torch: float
    ulp: float
    ulp_torch: float
    worst_tile: float
    worst_tile_torch: float
    faults: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The same as plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def as_matrix(t: Tensor) -> Tensor:
    """`t` (..., N) as (M, N); a vector or scalar is one row."""
    return t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t.reshape(1, -1)


def norms(values: Tensor, ulp: Tensor) -> Errors:
    """`values` float64, not empty, all finite."""
    return _norms(as_matrix(values).split(_rows_at_once(values)), ulp)


def counts(like: Tensor) -> Errors:
    """Number of elements in each norm of `like`."""
    m, n = as_matrix(like).shape
    heights, widths = (_lengths(size, like.device) for size in (m, n))
    one = torch.ones((), dtype=torch.float64, device=like.device)
    return Errors(m * n * one, one, one, n * one.expand(m), m * one.expand(n), heights[:, None] * widths)


def _lengths(size: int, device: torch.device) -> Tensor:
    """Length of each tile along a dimension of `size`."""
    starts = torch.arange(0, size, TILE, dtype=torch.float64, device=device)
    return (size - starts).clamp_max(TILE)


def _rows_at_once(like: Tensor) -> int:
    """Number of rows whose squares are in memory at once: a multiple of the tile."""
    return max(_BLOCK // max(like.shape[-1] if like.dim() else 1, 1) // TILE, 1) * TILE


def _norms(blocks: Iterable[Tensor], ulp: Tensor) -> Errors:
    """The norms of a matrix that comes in blocks of rows."""
    largest, rows, columns, tiles = [], [], [], []
    for block in blocks:
        m, n = block.shape
        squares = block.square()
        largest.append(block.abs().max())
        rows.append(squares.sum(1))
        columns.append(squares.sum(0))
        padded = pad(squares, (0, -n % TILE, 0, -m % TILE))
        tiles.append(padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE).sum((1, 3)))
    total = torch.stack(columns).sum(0)
    return Errors(
        total.sum().sqrt(),
        torch.stack(largest).max(),
        ulp,
        torch.cat(rows).sqrt(),
        total.sqrt(),
        torch.cat(tiles).sqrt(),
    )


def typical(exact: Tensor) -> Tensor:
    """Root mean square of the finite non-zero elements, as masked ones are zero by design; 0 if there are none."""
    squares = torch.where(exact.isfinite(), exact, 0.0).square()
    return (squares.sum() / (squares != 0).sum().clamp_min(1)).sqrt()


class NumberLine(NamedTuple):
    """Where float64 values lie among the numbers of a dtype, and of which of them ULPs count: those that do not cancel.

    One serves all errors against the same values.
    """

    places: Tensor
    counted: Tensor


def number_line(exact: Tensor, dtype: torch.dtype) -> NumberLine:
    """The number line of `dtype` for errors against `exact`."""
    return NumberLine(ordered(exact.to(dtype)), exact.isfinite() & (exact.abs() > CANCELLED * typical(exact)))


def errors(
    value: Tensor, exact: Tensor, dtype: torch.dtype, *, ulps: bool = True, line: NumberLine | None = None
) -> Errors:
    """Errors of `value` against float64 `exact`, over elements where both are finite.

    ULPs are those of `dtype`, over elements that do not cancel.  ulps=False leaves them out: they take most of the time
    and memory of a large tensor.   line: `number_line(exact, dtype)` where it is known.
    """

    def difference(pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        return torch.where(testable(a).isfinite() & b.isfinite(), a.to(torch.float64) - b, 0.0)

    rows = _rows_at_once(exact)
    pairs = zip(as_matrix(value).split(rows), as_matrix(exact).split(rows), strict=True)
    if not ulps:
        return _norms(map(difference, pairs), torch.zeros((), dtype=torch.float64, device=exact.device))
    places, counted = number_line(exact, dtype) if line is None else line
    steps = (ordered(value.to(dtype)) - places).abs()
    return _norms(map(difference, pairs), ulp_quantile(steps[counted & testable(value).isfinite()]))


def testable(t: Tensor) -> Tensor:
    """The same numbers in a dtype for which torch implements `isnan` and `isfinite`."""
    return t.to(torch.float32) if t.is_floating_point() and t.element_size() == 1 else t


def ordered(t: Tensor) -> Tensor:
    """Floating-point values as int64 counted along the number line: neighbours differ by one, both zeros are 0."""
    raw = bits(t).to(torch.int64)
    top = -(1 << (8 * t.element_size() - 1))
    return torch.where(raw < 0, top - raw, raw)


def ulp_quantile(steps: Tensor) -> Tensor:
    """The 99.9th percentile, or in a small tensor the one that leaves 100 elements above it (never below the median).

    Cancellation makes ULP errors heavy-tailed: the largest few are random, and no rule can compare them.
    """
    flat = steps.flatten()
    n = flat.numel()
    if n == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    above = max(n // 1000, min(100, n // 2))
    return flat.kthvalue(max(n - above, 1)).values.to(torch.float64)
