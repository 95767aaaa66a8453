"""The accuracy rule: compare errors, not outputs.

    err(ours) <= factor * err(torch in the same dtype) + floor

Both errors are against a float64 oracle.  factor is 2, or 3 for gradients.  The floor has three parts, none a guess:

- one rounding to the output dtype;
- two float32 roundings: a GPU's exp2, rsqrt and division are specified to these;
- jitter: the largest error of the reference itself in float32, when its inputs and the terms of its sums are off by up
  to one float32 rounding (`jitter.py`).  Jitter measures how much cancels in this very problem.

The rule holds for the full tensor and for every row, column and 64x64 tile of it.  Each part is judged by its own size:
a row 1000 times larger than the others hides no error in them.  Parts of fewer than 16 elements are not judged alone:
the ratio of two single rounding errors is random.

A part is sound if its relative error means something: jitter moves it by less than its size, and it is large, or jitter
moves it, relative to its size, no more than it moves large parts.

- Every part is allowed torch's error in the same part, and jitter in it times the ratio of torch's error to jitter in
  the full tensor.
- A sound part is also allowed torch's largest relative error in any sound part.
- In a part that is not sound, terms cancel.  What is left is rounding, and by chance torch or the few jittered runs
  have little of it there.  So jitter counts as no smaller than in the median of these parts, and torch's error as no
  smaller than jitter.  A part that jitter leaves as it is has no terms: it is masked.
- A part that is not sound and is under half the typical size may also lose what a float32 sum of a typical part loses
  in another order; the smaller the part, the more.  Nine tenths of the parts are no larger than a typical one.

A tensor vanishes if jitter moves all of it by more than its size: the gradient of attention to a single key is 0 in
exact arithmetic.  There torch's error counts as no smaller than jitter, no part is masked, and ULPs are not judged: no
digit is right.

NaN and infinity must be exactly where the oracle, rounded to the output dtype, has them.  Integers have no rounding:
ours must be the reference's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.validate.metrics import (
    CANCELLED,
    PARTS,
    TILE,
    Errors,
    Measure,
    counts,
    errors,
    norms,
    number_line,
    testable,
    typical,
)

FLOOR_ULP = 2.0
MIN_PART = 16
_NO_ERRORS = (0.0,) * 8  # the numbers of a tensor without measured errors
SUM_ORDER = 2.0**-16  # of half a typical part less this part: a float32 sum in another order, where terms cancel
NEARLY_ZERO = 0.1  # a part below this share of the norm that its size suggests may be left by terms that cancel
SOUND = 4.0  # times the relative change that jitter makes in large parts: it changes parts that cancel by more
FEW = 0.1  # share of the parts that may be larger than a typical one


@dataclass(frozen=True)
class Standard:
    """The standard of one output or gradient.   limit: the largest errors that pass.

    ulps: judge ULPs too.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    exact: Tensor
    rounded: Tensor
    size: Errors
    torch: Errors
    limit: Errors
    ulps: bool = True

    def judge(self, ours: object) -> Measure:
        """Measure `ours` and describe every fault.  None is autograd's zero gradient."""
        if ours is None and not self.exact.any():
            ours = torch.zeros_like(self.rounded)
        wrong = self._structure(ours)
        if wrong is not None or self.exact.numel() == 0:
            return Measure(self.name, *_NO_ERRORS, faults=() if wrong is None else (f"{self.name} {wrong}",))
        assert isinstance(ours, Tensor)
        if not self.dtype.is_floating_point:
            return Measure(self.name, *_NO_ERRORS, faults=self._other_integers(ours))
        measured = errors(ours.detach(), self.exact, self.dtype, ulps=self.ulps)
        faults = [f"{self.name}: {fault}" for fault in (*self._non_finite(ours), *self._excesses(measured))]
        return self._measure(measured, tuple(faults))

    def _structure(self, ours: object) -> str | None:
        if not isinstance(ours, Tensor):
            return f"is {ours!r}; expected a tensor"
        got = tuple(ours.shape), ours.dtype, ours.device.type
        expected = tuple(self.exact.shape), self.dtype, self.device.type
        return None if got == expected else f"has shape, dtype, device {got}; the reference has {expected}"

    def _other_integers(self, ours: Tensor) -> tuple[str, ...]:
        wrong = (ours != self.rounded).nonzero()
        if not len(wrong):
            return ()
        index = tuple(int(i) for i in wrong[0])
        return (f"{self.name}: {len(wrong)} integers are not the reference's; first difference at {index}",)

    def _non_finite(self, ours: Tensor) -> list[str]:
        kinds: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
            ("NaN", torch.isnan),
            ("+inf", torch.isposinf),
            ("-inf", torch.isneginf),
        )
        faults = []
        for kind, test in kinds:
            got, expected = test(testable(ours)), test(testable(self.rounded))
            if not torch.equal(got, expected):
                index = tuple(int(i) for i in (got != expected).nonzero()[0])
                ours_count, oracle_count = int(got.sum()), int(expected.sum())
                faults.append(
                    f"{ours_count} elements are {kind}, the oracle has {oracle_count}; first difference at {index}"
                )
        return faults

    def _excesses(self, measured: Errors) -> list[str]:
        faults = []
        for field, unit, scale in (
            ("frobenius", "of its norm", self.size.frobenius),
            ("largest", "of its largest value", self.size.largest),
            ("ulp", "ULP", torch.ones_like(self.size.ulp)),
        ):
            ours, theirs, limit = (float(getattr(e, field) / scale) for e in (measured, self.torch, self.limit))
            if not getattr(measured, field) <= getattr(self.limit, field):
                what = {"frobenius": "error", "largest": "largest error", "ulp": "high quantile of errors"}[field]
                faults.append(f"{what} {ours:.3g} {unit}; torch {theirs:.3g}, allowed {limit:.3g}")
        for part in PARTS:
            value, limit, torch_value, size = (getattr(e, part) for e in (measured, self.limit, self.torch, self.size))
            excess = ~(value <= limit)
            if excess.any():
                worst = int(torch.where(excess, value / limit, 0.0).argmax())
                off, allowed, theirs, norm = (float(v.flatten()[worst]) for v in (value, limit, torch_value, size))
                location = f"{int(excess.sum())} of {excess.numel()} {part} wrong: {_part(part, worst, size.shape)}"
                faults.append(
                    f"{location} off by {off:.3g} (its norm {norm:.3g}); torch {theirs:.3g}, allowed {allowed:.3g}"
                )
        return faults

    def _measure(self, measured: Errors, faults: tuple[str, ...]) -> Measure:
        norm = float(self.size.frobenius) or 1.0
        rms = norm / self.exact.numel() ** 0.5

        def worst(e: Errors) -> float:
            return float((e.tiles / self.size.tiles.clamp_min(rms * NEARLY_ZERO)).max())

        return Measure(
            self.name,
            float(measured.frobenius) / norm,
            float(self.torch.frobenius) / norm,
            float(measured.largest) / rms,
            float(self.torch.largest) / rms,
            float(measured.ulp),
            float(self.torch.ulp),
            worst(measured),
            worst(self.torch),
            faults,
        )


def standard(
    name: str,
    exact: Tensor,
    baseline: Tensor,
    jittered: Sequence[Tensor],
    factor: float,
    *,
    order: float = 0.0,
    ulps: bool = True,
) -> Standard:
    """The standard for one tensor.

    exact     result of the oracle; judged as float64, so that no norm of it overflows
    baseline  the reference in the dtype under test, on the same device
    jittered  the reference in float32 (or wider), its inputs or also the terms of its sums off by a rounding of it
    order     additional relative error of every part: from another order of addition, or from adders that truncate
    ulps      judge ULPs too
    """
    dtype, rounded = baseline.dtype, exact.to(baseline.dtype)
    exact = exact.double() if exact.is_floating_point() else exact
    zero = torch.zeros((), dtype=torch.float64, device=exact.device)
    if exact.numel() == 0 or not dtype.is_floating_point:
        zeros = Errors(*[zero] * len(Errors._fields))
        return Standard(name, dtype, exact.device, exact, rounded, zeros, zeros, zeros)
    size = norms(torch.where(exact.isfinite(), exact, 0.0), zero)
    line = number_line(exact, dtype) if ulps else None
    theirs, *noises = (errors(t, exact, dtype, ulps=ulps, line=line) for t in (baseline, *jittered))
    number = counts(exact)
    noise = Errors(*(torch.stack(e).amax(0) for e in zip(*noises, strict=True)))
    info = torch.finfo(dtype)
    relative = (
        order + info.eps / 2 + 2 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    )
    rms = typical(exact)
    torch_over_jitter = _ratio(theirs.frobenius, noise.frobenius)
    vanishes = noise.frobenius > size.frobenius
    limits = []
    for field in Errors._fields:
        their, norm, jitter, n = (getattr(e, field) for e in (theirs, size, noise, number))
        if field == "ulp":
            limit = factor * their + FLOOR_ULP + order / info.eps + jitter
            limits.append(torch.where(vanishes, torch.inf, limit))
            continue
        floor = relative * norm + info.smallest_normal * info.eps * n.sqrt()
        if field in PARTS:
            sound = _sound(norm / n.sqrt(), jitter / n.sqrt(), rms)
            jitter = _at_least_median(jitter / n.sqrt(), ~sound & (vanishes | (jitter > 0))) * n.sqrt()
            their = torch.maximum(their, torch.where(sound, _ratio(their, norm), 0.0).max() * norm)
            their = torch.maximum(their, torch.where(sound, torch_over_jitter, torch_over_jitter.clamp_min(1)) * jitter)
            typical_size = _typical_part(norm / n.sqrt(), rms)
            floor = floor + torch.where(sound, 0.0, SUM_ORDER * (typical_size * n.sqrt() / 2 - norm).clamp_min(0))
        else:
            their = torch.where(vanishes, torch.maximum(their, jitter), their)
        limit = factor * their + floor + jitter
        limits.append(torch.where(n < MIN_PART, torch.inf, limit) if field in PARTS else limit)
    return Standard(name, dtype, exact.device, exact, rounded, size, theirs, Errors(*limits), ulps)


def _sound(sizes: Tensor, noise: Tensor, rms: Tensor) -> Tensor:
    """True for parts whose relative errors are meaningful.   sizes: rms of each part.   noise: rms of its jitter."""
    large = sizes > NEARLY_ZERO * rms
    typical_noise = _ratio(noise, sizes)[large]
    if not len(typical_noise):
        return large
    quiet = (sizes > CANCELLED * rms) & (noise <= SOUND * typical_noise.median() * sizes)
    return (noise < sizes) & (large | quiet)


def _at_least_median(noise: Tensor, among: Tensor) -> Tensor:
    """`noise`, in the parts `among` all no less than the median of those that jitter moved."""
    moved = noise[among & (noise > 0)]
    return torch.where(among, noise.clamp_min(moved.median()), noise) if len(moved) else noise


def _typical_part(sizes: Tensor, rms: Tensor) -> Tensor:
    """The quantile 1 - FEW of the sizes of parts that are not empty; at most `rms`."""
    present = sizes[sizes > CANCELLED * rms]
    if len(present) < 2:
        return rms
    return torch.minimum(rms, present.sort().values[int((1 - FEW) * (len(present) - 1))])


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b > 0, a / b, 0.0)


def _part(part: str, index: int, shape: Sequence[int]) -> str:
    if part != "tiles":
        return f"{part[:-1]} {index}"
    i, j = divmod(index, shape[1])
    return f"tile [{i * TILE}:{(i + 1) * TILE}, {j * TILE}:{(j + 1) * TILE}]"
