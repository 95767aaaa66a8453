"""State that the cases of one run share: the device, rounds of timing, ceilings, and random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.bench.cases import Case
from tilewright.bench.matrix import matrix_rate
from tilewright.bench.timing import Timing
from tilewright.dispatch import Sample


@dataclass(frozen=True)
class Effort:
    """Rounds of each timing.

    rounds         interleaved timing of all contestants
    graph_rounds   CUDA graph of the chosen one
    host_rounds    host time
    paused_rounds  compute-bound cases with pauses; 0: none
    row_s          seconds; a timing that would take longer gets fewer rounds
    """

    rounds: int
    graph_rounds: int
    host_rounds: int
    paused_rounds: int = 0
    row_s: float = 2.0


class Shared:
    """One device, one setting.   read_gb_s: read bandwidth of this run, which predicts the time of a case.
    only_chosen: of our implementations, that which `auto` takes.
    """

    def __init__(
        self,
        device: torch.device,
        timing: Timing,
        effort: Effort,
        against: Sequence[str] | None,
        read_gb_s: float,
        only_chosen: bool = False,
    ) -> None:
        self.only_chosen = only_chosen
        self.device, self.timing, self.effort, self.against = device, timing, effort, against
        self.bytes_per_us = read_gb_s * 1e3
        self._flops_per_us: dict[torch.dtype, float] = {}
        self._drawn: tuple[tuple[object, ...], Sample] | None = None

    def sample(self, case: Case, seed: int) -> Sample:
        """Random inputs of the case; drawing gigabytes takes seconds, so the backward reuses those of the forward."""
        key = (case.contract.name, case.workload.name, case.dtype, seed)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = None  # frees the last ones first
            self._drawn = key, case.contract.inputs(case.workload.params, case.dtype, self.device, seed)
        return self._drawn[1]

    def flops_per_us(self, dtype: torch.dtype) -> float:
        """Matrix rate of this run, measured once."""
        if dtype not in self._flops_per_us:
            self._flops_per_us[dtype] = matrix_rate(dtype, self.device)
        return self._flops_per_us[dtype]
