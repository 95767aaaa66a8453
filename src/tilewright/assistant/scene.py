"""What changes look at: the model, the workload, what was observed, and what this machine can do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tilewright.assistant.observation.observe import Observation
from tilewright.assistant.workload import Workload
from tilewright.hardware.ceilings import Ceilings


@dataclass(frozen=True)
class Scene:
    """What a change may look at before it is tried.

    kept: names of the changes in force by then. request_us: a request with them; None takes the observed one.
    """

    model: nn.Module
    work: Workload
    seen: Observation
    ceilings: Ceilings
    kept: tuple[str, ...] = ()
    request_us: float | None = None

    @property
    def now_us(self) -> float:
        """A request as it is now."""
        return self.seen.request_us if self.request_us is None else self.request_us
