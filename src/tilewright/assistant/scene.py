"""What a change is judged from before it is tried: model, workload, observation, and this machine's ceilings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tilewright.assistant.observation.observe import Observation
from tilewright.assistant.workload import Workload
from tilewright.hardware.ceilings import Ceilings


@dataclass(frozen=True)
class Scene:
    """All that a change may read to say whether it applies, and what it would gain.

    in_force: names of the changes kept so far. request_us: time of a request with them; None means as observed.
    """

    model: nn.Module
    work: Workload
    observation: Observation
    ceilings: Ceilings
    in_force: tuple[str, ...] = ()
    request_us: float | None = None

    @property
    def now_us(self) -> float:
        """Microseconds of a request with the changes kept so far."""
        return self.observation.request_us if self.request_us is None else self.request_us
