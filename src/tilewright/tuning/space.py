"""The candidates of one problem: every backend that can run it, in every configuration of its search space."""

import random
from dataclasses import dataclass
from typing import Any, Literal

from tilewright.dispatch import implementations
from tilewright.dispatch.options import runnable
from tilewright.dispatch.tables.configs import to_row
from tilewright.tuning.problem import Problem, fake_call

Search = Literal["exhaustive", "random"]


@dataclass(eq=False)
class Trial:
    """One candidate and its result.

    default  the present choice, or a backend's choice where nothing is tuned
    kernel   which of the backend's kernels; "" where it has one without a name
    reason   why it was dropped; None while it is in the race
    us       its median time, microseconds
    """

    backend: str
    config: Any
    default: bool = False
    kernel: str = ""
    reason: str | None = None
    us: float | None = None

    @property
    def choice(self) -> tuple[str, Any]:
        """(backend, config), the form that is sent to a worker."""
        return self.backend, self.config

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"backend": self.backend, "config": self.row, "us": self.us, "reason": self.reason}

    @property
    def row(self) -> dict[str, Any] | None:
        """The config as a table writes it."""
        return to_row(self.config, self.kernel)

    def __str__(self) -> str:
        fields = self.row
        return self.backend if not fields else f"{self.backend} " + " ".join(f"{k}={v}" for k, v in fields.items())


@dataclass(frozen=True)
class Space:
    """The trials of a problem.   present: what runs now.   first: it, then backends' defaults.   rest: the others."""

    bucket: str
    dtype: str
    present: Trial
    why: str
    first: tuple[Trial, ...]
    rest: tuple[Trial, ...]

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All of them, in the order they are tried."""
        return self.first + self.rest


def space(problem: Problem, search: Search, backend: str | None = None) -> Space:
    """The candidates of `problem`, in the order they are tried; with `backend`, only that backend's.

    The present choice is always among them.  torch is a candidate in the forward only: its backward is autograd's,
    which a table row cannot name.
    """
    with fake_call(problem) as call:
        raw, args = call
        plan = raw.plan(args, "auto", "default")
        bucket, dtype = raw.bucket_of(args, "default"), raw.dtype_of(args)
        impls = implementations(raw.op, raw.direction, raw.device_of(args).type)
        able = runnable(raw, impls, args, "default")
    present = Trial(plan.backend, plan.config, default=True, kernel=plan.kernel)
    first, rest = [present], list[Trial]()
    for name, implementation in able.items():
        if (backend is not None and name != backend) or (name == "torch" and problem.direction == "bwd"):
            continue
        configs = (None,) if implementation is None else implementation.space(bucket, dtype)
        for i, config in enumerate(configs):
            kernel = "" if implementation is None else implementation.kernel_of(config).kernel
            if (name, kernel, config) != (present.backend, present.kernel, present.config):
                (rest if i else first).append(Trial(name, config, default=not i, kernel=kernel))
    if search == "random":
        random.Random(problem.seed).shuffle(rest)
    return Space(plan.bucket, plan.dtype, present, plan.why, tuple(first), tuple(rest))
