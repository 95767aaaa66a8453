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

    in_force: names of the changes kept by then. request_us: a request with them; None takes the observed one.
    """

    model: nn.Module
    work: Workload
    observation: Observation
    ceilings: Ceilings
    in_force: tuple[str, ...] = ()
    request_us: float | None = None

    @property
    def now_us(self) -> float:
        """A request as it is now."""
        return self.observation.request_us if self.request_us is None else self.request_us
