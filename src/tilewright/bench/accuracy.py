"""Is an output right enough to be timed? Errors against a float64 oracle, judged by the error that torch makes in the
same dtype.

Two measures of each output: relative Frobenius error, which sees bias and lost precision, and the largest error over
the root mean square, which sees one wrong tile in a large tensor. Both may be at most `factor` times torch's own,
plus one rounding of the output dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.dispatch import Sample


@dataclass(frozen=True, slots=True)
class Error:
    """Errors of one output against its oracle; NaN or a wrong shape is infinite."""

    frobenius: float
    largest: float


def upcast(sample: Sample) -> Sample:
    """The same values in float64."""
    return Sample(
        tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in sample.args),
        {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in sample.kwargs.items()},
    )


def tensors(outputs: object) -> list[Tensor]:
    """The tensors an op returned, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    assert isinstance(outputs, Iterable)
    return [item for item in outputs if isinstance(item, Tensor)]


def error(output: Tensor, oracle: Tensor) -> Error:
    """Errors of `output`, any dtype, against `oracle`, float64 of the same shape."""
    if output.shape != oracle.shape:
        return Error(math.inf, math.inf)
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


def worst(found: Sequence[Error]) -> float:
    """Largest relative Frobenius error of an op's outputs."""
    return max(item.frobenius for item in found)


def passes(
    found: Sequence[Error],
    torchs: Sequence[Error],
    oracle: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    factor: float,
) -> bool:
    """Is every output's error within `factor` of torch's, plus one rounding?"""
    for mine, theirs, expected, dtype in zip(found, torchs, oracle, dtypes, strict=True):
        unit = torch.finfo(dtype).eps / 2
        rms = float(expected.norm()) / math.sqrt(expected.numel()) or 1.0
        peak = float(expected.abs().max()) / rms
        if not (
            mine.frobenius <= factor * theirs.frobenius + unit and mine.largest <= factor * theirs.largest + unit * peak
        ):
            return False
    return True
