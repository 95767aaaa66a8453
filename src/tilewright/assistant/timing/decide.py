"""Decide what a measured gain says, given what two equal models differ by on this machine now (the control).

The rule: a change is faster where the whole 95 % interval of its gain lies above 1 and above the far end of the
control's interval, and slower where it lies below both the other way round. A machine on which the control itself is
off by more than a quarter is too noisy: nothing is called faster or slower there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilewright.assistant.timing.measure import Comparison, Metric

Decision = Literal["kept", "rejected", "not judged"]

TOO_NOISY = 1.25
_TOO_WIDE = 1.05  # an interval that reaches beyond this on both sides of 1 says nothing


@dataclass(frozen=True)
class Noise:
    """limit: the largest factor, either way, in the 95 % interval of the control; at least 1."""

    limit: float = 1.0
    low: float = 1.0
    high: float = 1.0

    @staticmethod
    def of(control: Comparison | None) -> Noise:
        """What `control`, two identical models, says of this machine."""
        if control is None:
            return Noise()
        gain = control.decisive
        return Noise(max(1.0, gain.gain_high, 1 / max(gain.gain_low, 1e-9)), gain.gain_low, gain.gain_high)

    @property
    def too_noisy(self) -> bool:
        """Whether nothing can be judged."""
        return self.limit > TOO_NOISY

    @property
    def sentence(self) -> str:
        """Why nothing can be judged."""
        return (
            f"this machine is too noisy to judge now: two equal models differ by {self.low:.2f}x to "
            f"{self.high:.2f}x on it"
        )


def decide(gain: Metric, noise: Noise, *, clock: str = "wall") -> tuple[Decision, str]:
    """The decision, and the sentence that gives its reason."""
    unit = " CPU time" if clock == "cpu" else ""
    measured = f"{gain.name}{unit} {gain.gain:.3f}x (95 %: {gain.gain_low:.3f} to {gain.gain_high:.3f})"
    if noise.too_noisy:
        return "not judged", f"{measured}; {noise.sentence}."
    if gain.gain_low > noise.limit:
        return "kept", f"{measured}: faster beyond its interval."
    if gain.gain_high < 1 / noise.limit:
        return "rejected", f"{measured}: slower."
    if gain.gain_low < 1 / _TOO_WIDE and gain.gain_high > _TOO_WIDE:
        return "not judged", f"{measured}: the machine was too noisy to tell a gain from a loss."
    if gain.gain_low > 1.0:
        return "rejected", f"{measured}: no more than two equal models differ by here ({noise.limit:.3f}x)."
    return "rejected", f"{measured}: the interval does not exclude no gain."
