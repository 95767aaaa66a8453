"""The number of cores that other processes use during a timing on a CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
BUSY_CORES = 0.2  # used by others: from here on a machine is busy


class OtherLoad:
    """Load since its creation; 0 where the system does not report it (anything but Linux)."""

    def __init__(self) -> None:
        self._start = _reading()

    def cores(self) -> float:
        """Cores that other processes used on average since then."""
        if self._start is None or (now := _reading()) is None:
            return 0.0
        wall, this_process, everyone = (end - begin for end, begin in zip(now, self._start, strict=True))
        return max(0.0, everyone - this_process) / wall if wall > 0 else 0.0

    @property
    def busy(self) -> bool:
        """Whether others used enough of it to disturb a measurement."""
        return self.cores() > BUSY_CORES


def _reading() -> tuple[float, float, float] | None:
    """Seconds of wall time, of CPU time of this process and its children, of CPU time of all processes."""
    if not _STAT.exists():
        return None
    user, nice, system, _, _, irq, softirq, *_ = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:])
    ticks = os.sysconf("SC_CLK_TCK")
    times = os.times()
    this_process = times.user + times.system + times.children_user + times.children_system
    return time.perf_counter(), this_process, (user + nice + system + irq + softirq) / ticks
