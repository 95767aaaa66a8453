"""Closeness of the outputs of two models: relative errors and their limits, and how often the top token is the same."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError

MOST = 0.25  # largest relative error of logits in float8: a model that loses more does not suit it
FLOOR = 1e-6  # relative errors below this are float32 noise: the wider copy still norms and rotates in float32
Z95 = 1.959964  # standard deviations on either side that hold 95 % of a normal distribution


@dataclass(frozen=True)
class Comparison:
    """Relative Frobenius error of the patched and of the unpatched model against the reference.

    narrow: the error of the same float8, or other format of few bits, with plain torch products; our kernels may add
    `limit` times that.   most: largest error in such a format.   floor: an error that always passes.
    """

    error: float
    unpatched_error: float
    limit: float
    narrow: float = 0.0
    most: float = MOST
    floor: float = FLOOR

    @property
    def ratio(self) -> float:
        """Error of the patched model over that of the unpatched one; 1 where both are exact."""
        if self.unpatched_error == 0.0:
            return 1.0 if self.error == 0.0 else math.inf
        return self.error / self.unpatched_error

    @property
    def excess(self) -> float:
        """The error over what is allowed without `narrow`; more than 1 fails."""
        return self.error / (self.limit * self.unpatched_error + self.floor)

    @property
    def passed(self) -> bool:
        """True if the error is at most `limit` times the sum of the unpatched model's and float8's.  A NaN fails."""
        return self.error <= self.limit * (self.unpatched_error + self.narrow) + self.floor and not (
            self.narrow and self.error > self.most
        )

    def __str__(self) -> str:
        if self.narrow:
            return (
                f"{self.error:.3e}, the same numbers in plain torch {self.narrow:.3e}, "
                f"unpatched {self.unpatched_error:.3e} "
                f"(limit {self.limit:g} of their sum, and {self.most:g})"
            )
        return f"{self.error:.3e}, unpatched {self.unpatched_error:.3e}, ratio {self.ratio:.3f} (limit {self.limit:g})"


@dataclass(frozen=True)
class Agreement:
    """`count` of `total` tokens have the reference's most likely next token."""

    count: int
    total: int

    @classmethod
    def of(cls, logits: Tensor, reference: Tensor) -> "Agreement":
        """Top-1 agreement of logits (N, V) with the reference's (N, V); they may lie on two devices."""
        same = logits.argmax(-1).cpu() == reference.argmax(-1).cpu()
        return cls(int(same.sum()), same.numel())

    @property
    def rate(self) -> float:
        """count / total."""
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval at 95 %: stays inside [0, 1] and has width even at 100 % (Wilson 1927)."""
        z, n, p = Z95, self.total, self.rate
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def change_from(self, before: "Agreement") -> tuple[float, float]:
        """95 % interval of this rate less `before`'s, two independent samples (Newcombe 1998, method 10)."""
        (low, high), (before_low, before_high) = self.interval, before.interval
        change = self.rate - before.rate
        return (
            change - math.hypot(self.rate - low, before_high - before.rate),
            change + math.hypot(high - self.rate, before.rate - before_low),
        )

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rate:.2%} [{low:.2%}, {high:.2%}]"


def relative_error(got: Sequence[Tensor | None], reference: Sequence[Tensor | None]) -> float:
    """Frobenius norm of the difference over that of the reference, all tensors taken as one, in float64.

    None means zeros (a parameter without a gradient). Returns inf if `got` holds a NaN or an infinity.
    """
    difference, norm = squares(got, reference)
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def squares(got: Sequence[Tensor | None], reference: Sequence[Tensor | None]) -> tuple[float, float]:
    """Squared Frobenius norms of the difference and of the reference, as in `relative_error`."""
    difference = norm = 0.0
    for ours, theirs in zip(got, reference, strict=True):
        if theirs is None:
            continue
        if ours is None:
            ours = torch.zeros_like(theirs)
        rows = zip(torch.atleast_1d(ours).split(1024), torch.atleast_1d(theirs).split(1024), strict=True)
        for our_rows, their_rows in rows:  # in pieces: logits of a long prompt are gigabytes
            theirs_fp64 = their_rows.double()
            difference += float((our_rows.to(theirs_fp64.device).double() - theirs_fp64).square().sum())
            norm += float(theirs_fp64.square().sum())
    return difference if math.isfinite(difference) else math.inf, norm


def logits_of(output: Any) -> Tensor:
    """The tensor to compare in the result of a forward call: `.logits`, or the first tensor in it."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(output, (tuple, list, Mapping)) else ():
        if isinstance(value, Tensor):
            return value
    raise InputError(f"the model returned {type(output).__name__}, in which there is no tensor to compare.")
