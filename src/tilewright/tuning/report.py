"""The report of a tuning run, row by row: before, after, and the result of every candidate."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.tuning.space import Trial


@dataclass(frozen=True)
class Tuned:
    """One (op, direction, bucket, dtype).

    before   the choice until now; `why` is dispatch's reason for it
    after    the choice in the table now
    gain     time of `before` over that of `after`, round by round, minus one
    changed  True if `after` is another choice than `before`
    note     why it was or was not changed
    """

    op: str
    case: str
    direction: str
    bucket: str
    dtype: str
    before: Trial
    why: str
    after: Trial
    gain: float | None
    changed: bool
    note: str
    row: dict[str, Any]
    trials: tuple[Trial, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data; trials in the order they were tried."""
        plain = {name: getattr(self, name) for name in ("op", "case", "direction", "bucket", "dtype")}
        plain |= {"before": self.before.to_dict(), "why": self.why, "after": self.after.to_dict()}
        plain |= {"gain": self.gain, "changed": self.changed, "note": self.note, "row": self.row}
        return {**plain, "seconds": self.seconds, "trials": [trial.to_dict() for trial in self.trials]}


@dataclass(frozen=True)
class Untuned:
    """A case that could not be tuned, and why.   failed: by an error, not for lack of time or of candidates."""

    op: str
    case: str
    dtype: str
    direction: str
    reason: str
    failed: bool


@dataclass
class Report:
    """A run.   seed: reproduces the inputs and, in a random search, the order.

    fresh: number of cases left out because their rows are of this machine and of the versions that run now.
    """

    device: str
    seed: int
    table: Path
    tuned: list[Tuned] = field(default_factory=list)
    untuned: list[Untuned] = field(default_factory=list)
    fresh: int = 0

    @property
    def ok(self) -> bool:
        """True if no case failed."""
        return not any(case.failed for case in self.untuned)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "kind": "tune",
            "device": self.device,
            "seed": self.seed,
            "table": str(self.table),
            "fresh": self.fresh,
            "tuned": [each.to_dict() for each in self.tuned],
            "untuned": [vars(each) for each in self.untuned],
        }

    def __str__(self) -> str:
        lines = [f"{'op bucket dtype direction':<52} {'before us':>10} {'after us':>10} {'gain':>7}  choice"]
        for each in self.tuned:
            name = f"{each.op} {each.bucket} {each.dtype} {each.direction}"
            gain = "-" if each.gain is None else f"{100 * each.gain:+.1f}%"
            before = "-" if each.before.us is None else f"{each.before.us:.2f}"
            mark = "" if each.changed else f"  ({each.note})"
            lines.append(f"{name:<52} {before:>10} {each.after.us or 0.0:>10.2f} {gain:>7}  {each.after}{mark}")
        lines += [f"not tuned: {u.op} {u.case} {u.dtype} {u.direction}: {u.reason}" for u in self.untuned]
        if not (self.tuned or self.untuned or self.fresh):
            return f"nothing to tune: at these sizes no op is called that has kernels of ours for {self.device}"
        changed = sum(each.changed for each in self.tuned)
        fresh = f", {self.fresh} left out: their rows are fresh" if self.fresh else ""
        lines.append(f"{len(self.tuned)} tuned, {changed} changed{fresh}; table {self.table}")
        return "\n".join([*lines, *self.losers()])

    def losers(self) -> list[str]:
        """One line for each reason why candidates were dropped, the most frequent first."""
        texts = (trial.reason for each in self.tuned for trial in each.trials)
        reasons = Counter(reason.split(":", maxsplit=1)[0] for reason in texts if reason is not None)
        return [f"dropped {count}: {reason}" for reason, count in reasons.most_common()]
