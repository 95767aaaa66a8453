"""Compile everything a suite or a model will need, before it is needed and on a machine that need not have a GPU.

    outcome = warm(Scope(model="path/to/model"), ["sm_90"])
    bundle.export(Path("kernels.zip"), outcome.entries())

Three steps: the raw calls (`needed`), the kernels that their launch code would launch on each architecture
(`planning`), and their compilation, many at once (`processes`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewright.dispatch.backends import missing, on_device
from tilewright.errors import UsageError
from tilewright.hardware import arch as this_machine
from tilewright.hardware.known import GPUS, machine
from tilewright.jit import cache
from tilewright.jit.cache import Entry
from tilewright.settings import current
from tilewright.warmup.planning import Failure
from tilewright.warmup.processes import Event, Kernel, PlanSummary, events
from tilewright.warmup.scope import Scope

__all__ = ["Event", "Failure", "Kernel", "Outcome", "PlanSummary", "Scope", "architectures", "warm"]


@dataclass
class Outcome:
    """The results of a warm-up: planned machines, compiled kernels, failures."""

    machines: list[PlanSummary] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        """The kernels' entries in the cache, to export."""
        folders = {kernel.folder for kernel in self.kernels}
        return [entry for entry in cache.entries() if entry.folder.name in folders]


def warm(
    scope: Scope,
    archs: Sequence[str] = (),
    *,
    jobs: int | None = None,
    progress: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Compile into the kernel cache what `scope` needs on each of `archs` (none: on this machine).

    jobs: compilations at once; None is `TILEWRIGHT_MAX_JOBS`, by default what memory and cores allow.
    What cannot be compiled is in the outcome's failures.  Raises UsageError for an unknown suite, model or machine.
    """
    outcome = Outcome()
    this_arch = this_machine()
    for arch in architectures(archs or [this_arch]):
        for event in events(scope, arch, jobs or current().max_jobs, hide_gpus=arch != this_arch):
            if isinstance(event, PlanSummary):
                outcome.machines.append(event)
            elif isinstance(event, Kernel):
                outcome.kernels.append(event)
            else:
                outcome.failures.append(event)
            progress(event)
    if not any(each.calls for each in outcome.machines):
        raise UsageError("nothing to prepare: no call of the suite or model has such a backend on these architectures.")
    absent = {} if outcome.kernels or outcome.failures else _absent(outcome.machines)
    if absent:
        raise UsageError(
            "no kernel was prepared: torch computes every call, because this machine cannot compile "
            f"{', '.join(f'{backend} kernels (it {reason})' for backend, reason in absent.items())}."
        )
    return outcome


def _absent(plans: Sequence[PlanSummary]) -> dict[str, str]:
    """Backends whose kernels this machine cannot compile, and what each lacks."""
    devices = {"cpu" if machine.arch == "cpu" else "cuda" for machine in plans}
    reasons = {name: missing(name, device) for device in devices for name in on_device(device)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def architectures(names: Sequence[str]) -> list[str]:
    """Architectures by name, each once: "sm_90a" and "sm_90" are the same.  Raises UsageError for an unknown name."""
    archs = list(dict.fromkeys(machine(name) for name in names))
    if unknown := [name for name in archs if name not in (*GPUS, "cpu")]:
        raise UsageError(f"--arch {', '.join(unknown)}: known are {', '.join(GPUS)} and cpu.")
    return archs
