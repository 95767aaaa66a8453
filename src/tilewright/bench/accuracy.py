"""Check outputs before they are timed: errors against a float64 oracle, judged by torch's error in the same dtype.

Two measures of each output: relative Frobenius error, which sees bias and lost precision, and the largest error over
the root mean square, which sees one wrong tile in a large tensor. Both may be at most `factor` times torch's own,
plus one rounding of the output dtype and what the order of a float32 sum may change. Integers (packed scales, bounds of
groups) have no rounding: all must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.dispatch import Sample

_SUM_ORDER = 2.0**-20  # a few float32 roundings: every order of summation is right


@dataclass(frozen=True, slots=True)
class Error:
    """Errors of one output against its oracle; NaN or a wrong shape is infinite."""

    frobenius: float
    largest: float


def upcast(sample: Sample) -> Sample:
    """The same values in float64."""

    def widen(v: Any) -> Any:
        return v.double() if isinstance(v, Tensor) and v.is_floating_point() else v

    args, kwargs = tree_map(widen, (sample.args, dict(sample.kwargs)))
    return Sample(args, kwargs)


def tensors(outputs: object) -> list[Tensor]:
    """The tensors an op returned, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    assert isinstance(outputs, Iterable)
    return [item for item in outputs if isinstance(item, Tensor)]


def error(output: Tensor, oracle: Tensor) -> Error:
    """Errors of `output`, any dtype, against `oracle`, of the same shape in float64 or integers."""
    if output.shape != oracle.shape:
        return Error(math.inf, math.inf)
    if not output.is_floating_point():
        return Error(0.0, 0.0) if torch.equal(output, oracle.to(output.dtype)) else Error(math.inf, math.inf)
    difference = output.detach().double() - oracle
    scale = float(oracle.norm()) or 1.0
    frobenius = float(difference.norm()) / scale
    largest = float(difference.abs().max()) / (scale / math.sqrt(oracle.numel()))
    return Error(frobenius, largest) if math.isfinite(frobenius) else Error(math.inf, math.inf)


def errors(outputs: Sequence[Tensor], oracle: Sequence[Tensor]) -> list[Error]:
    """Errors of all outputs; infinite for all when their number is wrong."""
    if len(outputs) != len(oracle):
        return [Error(math.inf, math.inf)] * len(oracle)
    return [error(output, expected) for output, expected in zip(outputs, oracle, strict=True)]


def worst(output_errors: Sequence[Error]) -> float:
    """Largest relative Frobenius error of an op's outputs."""
    return max(item.frobenius for item in output_errors)


class Judge:
    """Judges outputs, given the float64 oracle and what torch computes in the inputs' own dtype."""

    def __init__(self, oracle: Sequence[Tensor], torchs: Sequence[Tensor], factor: float) -> None:
        self._oracle = list(oracle)
        self._torch_errors = errors(torchs, oracle)
        self._dtypes = [output.dtype for output in torchs]
        self._factor = factor

    @property
    def torch_error(self) -> float:
        """Relative error of torch."""
        return worst(self._torch_errors)

    def __call__(self, outputs: object) -> tuple[bool, float]:
        """(right enough, relative error)."""
        output_errors = errors(tensors(outputs), self._oracle)
        correct = all(map(self._passes, output_errors, self._torch_errors, self._oracle, self._dtypes))
        return correct, worst(output_errors)

    def _passes(self, ours: Error, theirs: Error, oracle: Tensor, dtype: torch.dtype) -> bool:
        if not dtype.is_floating_point:
            return ours.largest == 0
        unit = torch.finfo(dtype).eps / 2 + _SUM_ORDER
        rms = float(oracle.norm()) / math.sqrt(oracle.numel()) or 1.0
        peak = float(oracle.abs().max()) / rms
        frobenius_passes = ours.frobenius <= self._factor * theirs.frobenius + unit
        return frobenius_passes and ours.largest <= self._factor * theirs.largest + unit * peak
