"""The measurements of one case as rows: one of the result file, one of a tuning table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.bench.cases import Case
from tilewright.bench.commit import commit
from tilewright.bench.contestants import Choice
from tilewright.bench.schema import Choice as TableChoice
from tilewright.bench.schema import Row
from tilewright.bench.statistics import Samples, paired_ratio
from tilewright.dispatch.tables.configs import to_row
from tilewright.hardware.ceilings import dtype_name


@dataclass
class Times:
    """Samples by name, of our backends (torch is one) and of the peers.   paused: with a pause before each, if any."""

    ours: dict[str, Samples]
    peers: dict[str, Samples]
    floor: float
    paused: dict[str, Samples] = field(default_factory=dict)

    @property
    def best_kernel(self) -> str | None:
        """Name of our fastest kernel; the torch backend does not count."""
        return _fastest(self.ours, _kernels(self.ours))

    @property
    def best_peer(self) -> str | None:
        """Name of the fastest peer."""
        return _fastest(self.peers, self.peers)

    def ratio(self, name: str | None) -> float | None:
        """Best peer / our `name`, round by round: above 1 ours is faster."""
        return _ratio({**self.peers, **self.ours}, self.best_peer, name)

    def ratio_own_paused(self) -> float | None:
        """Best peer / best kernel of ours, both chosen by their paused times."""
        kernel = _fastest(self.paused, _kernels(self.ours))
        return _ratio(self.paused, _fastest(self.paused, self.peers), kernel)


def row(
    case: Case,
    times: Times,
    *,
    chosen: str,
    timing: str,
    l2: str,
    host_us: float,
    graph_us: float | None,
    err: Mapping[str, float],
) -> Row:
    """The case's row of the result file.   err: error of every contestant."""
    best_peer = times.best_peer
    return Row(
        *case.key[:2],
        params={k: _plain(v) for k, v in case.workload.params.items()},
        dtype=dtype_name(case.dtype),
        direction=case.direction,
        timing=timing,
        l2=l2,
        impls=_medians(times.ours),
        chosen=chosen,
        peers=_medians(times.peers),
        floor_us=rounded(times.floor),
        ratio_own=times.ratio(times.best_kernel),
        ratio_auto=times.ratio(chosen),
        eager_us=rounded(host_us),
        graph_us=None if graph_us is None else rounded(graph_us),
        err=rounded(err[chosen], digits=4),
        err_peer=None if best_peer is None else rounded(err[best_peer], digits=4),
        spread=rounded(times.ours[chosen].spread, digits=3),
        paused=_medians(times.paused),
        ratio_own_paused=times.ratio_own_paused(),
        commit=commit(),
    )


def table_choice(case: Case, selection: Choice, ours: Mapping[str, Samples]) -> TableChoice | None:
    """The table row of our fastest backend.

    A torch backward that recomputes the forward is excluded: what was timed under that name is torch's own autograd.
    """
    gradient = case.contract.gradient
    torch_recomputes = case.direction == "bwd" and gradient is not None and gradient.recomputes
    eligible = [n for n in selection.names if n in ours and not (torch_recomputes and n == "torch")]
    if not eligible:
        return None
    best = min(eligible, key=lambda name: ours[name].median)
    plan = selection.plans[best]
    torch_us = ours["torch"].median if "torch" in ours else None
    return TableChoice(
        op=selection.raw.op,
        direction=case.direction,
        bucket=plan.bucket,
        dtype=plan.dtype,
        backend=best,
        config=to_row(plan.config, plan.kernel),
        us=rounded(ours[best].median),
        noise=rounded(ours[best].spread, digits=3),
        torch_us=None if torch_us is None else rounded(torch_us),
    )


def rounded(value: float, digits: int = 5) -> float:
    """Round to significant digits: more than five of a time are noise, and make result files large."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def _medians(samples: Mapping[str, Samples]) -> dict[str, float]:
    return {name: rounded(each.median) for name, each in samples.items()}


def _kernels(ours: Iterable[str]) -> list[str]:
    return [name for name in ours if name != "torch"]


def _fastest(samples: Mapping[str, Samples], among: Iterable[str]) -> str | None:
    return min((name for name in among if name in samples), key=lambda name: samples[name].median, default=None)


def _ratio(samples: Mapping[str, Samples], peer: str | None, ours: str | None) -> float | None:
    if peer is None or ours is None:
        return None
    return rounded(paired_ratio(samples[peer], samples[ours]).value)


def _plain(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else value
