"""The report of `check`: one result per case and mode, readable by people and programs."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from tilewright.errors import VerificationError
from tilewright.validate.metrics import Measure

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """One mode on one case.   details: the faults, or why it was skipped, or remarks on how it ran.

    computes: True if the mode runs the op; others only test calls that are refused before a launch.
    """

    case: str
    dtype: str
    mode: str
    status: Status
    details: tuple[str, ...]
    measures: tuple[Measure, ...]
    seconds: float
    computes: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "case": self.case,
            "dtype": self.dtype,
            "mode": self.mode,
            "computes": self.computes,
            "status": self.status,
            "details": list(self.details),
            "measures": [m.to_dict() for m in self.measures],
            "seconds": round(self.seconds, 4),
        }

    def __str__(self) -> str:
        lines = [f"{self.status.upper()} {self.mode}: {self.case}, {self.dtype}"]
        return "\n".join([*lines, *(f"    {d}" for d in self.details)])


@dataclass(frozen=True)
class CheckReport:
    """The results of `check`.  A report in which nothing ran has not passed."""

    op: str
    backend: str
    device: str
    seed: int
    results: tuple[Result, ...]

    @property
    def failures(self) -> tuple[Result, ...]:
        """Results that failed."""
        return tuple(r for r in self.results if r.status == "failed")

    @property
    def passed(self) -> bool:
        """True if the op ran in some mode, and nothing failed."""
        return not self.failures and self.ran

    @property
    def ran(self) -> bool:
        """True if some mode ran the op and judged its results."""
        return any(r.status != "skipped" and r.computes for r in self.results)

    @property
    def failed_modes(self) -> tuple[str, ...]:
        """Names of the modes that failed, each once, in order."""
        return tuple(dict.fromkeys(r.mode for r in self.failures))

    def require(self) -> "CheckReport":
        """Return this report if it passed; raise VerificationError with its text otherwise."""
        if not self.passed:
            raise VerificationError(str(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {
            "op": self.op,
            "backend": self.backend,
            "device": self.device,
            "seed": self.seed,
            "passed": self.passed,
            "ran": self.ran,
            "results": [r.to_dict() for r in self.results],
        }

    def __str__(self) -> str:
        count = Counter(r.status for r in self.results)
        verdict = "FAILED" if self.failures else "passed" if self.passed else "NOT CHECKED, nothing ran"
        lines = [
            f"{self.op} [{self.backend}] on {self.device}, seed {self.seed}: {verdict}; "
            f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"
        ]
        lines += [str(r) for r in self.failures]
        skipped = Counter((r.mode, r.details) for r in self.results if r.status == "skipped")
        lines += [f"skipped {mode} ({times}x): {'; '.join(why)}" for (mode, why), times in skipped.items()]
        lines += sorted({f"{r.mode}: {d}" for r in self.results if r.status == "passed" for d in r.details})
        return "\n".join(lines)
