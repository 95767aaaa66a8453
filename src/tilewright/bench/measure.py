"""One case: check everybody, time everybody and the floor in the same rounds, check again, make the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.bench import accuracy
from tilewright.bench.bandwidth import floor_calls, floor_us
from tilewright.bench.cases import Case
from tilewright.bench.contestants import (
    Choice,
    Contestant,
    choice,
    contestants,
    prepare,
    random_cotangents,
    reference_outputs,
)
from tilewright.bench.graph import MIN_LAUNCHES, capture, interleave_graphs, interleave_replays
from tilewright.bench.peers import Call
from tilewright.bench.rotation import rotate, sets_for
from tilewright.bench.schema import Choice as TableChoice
from tilewright.bench.schema import Note, Row
from tilewright.bench.statistics import Samples, paired_ratio
from tilewright.bench.timing import Timing, host_us, interleave
from tilewright.dispatch import Cost, Sample
from tilewright.hardware import device_info
from tilewright.hardware.ceilings import dtype_name

LAUNCH_SIZED_BYTES = 8 << 20  # about 2 us of traffic on a datacentre GPU: less than the host needs for a launch
_GRAPH_LAUNCHES = 128
_FLOOR_SHARE = (
    0.9  # torch's and Triton's streams come within a few percent of each other; a tenth is no scheduling luck
)
_FLOOR_SLACK_US = 0.3  # resolution of an event pair, spread over a sample
_MATRIX_INTENSITY = 8  # flops a byte; below the ridge point of every processor with matrix units, traffic alone decides
_PREFIX = "floor:"


@dataclass(frozen=True)
class Effort:
    """How long to look: rounds of the interleaved timing, of graph timing of the chosen one, and of host timing."""

    rounds: int
    graph_rounds: int
    host_rounds: int


@dataclass
class Measured:
    """A case's row, and notes. There is no row when what `auto` picks is wrong; `failures` says so."""

    row: Row | None
    table: TableChoice | None
    left_out: list[Note]
    failures: list[Note]


class Bench:
    """Measures cases on one device with one setting, keeping what cases share."""

    def __init__(self, device: torch.device, timing: Timing, effort: Effort, against: Sequence[str] | None) -> None:
        self.device, self.timing, self.effort, self.against = device, timing, effort, against
        self._flops_per_us: dict[torch.dtype, float] = {}
        self._drawn: tuple[tuple[object, ...], Sample] | None = None

    def measure(self, case: Case, seed: int = 0) -> Measured:
        """Check, time and check again; contestants that may not be timed become notes."""
        return _Case(self, case, seed).run()

    def sample(self, case: Case, seed: int) -> Sample:
        """Random inputs of the case; drawing gigabytes takes seconds, so the backward gets those of the forward."""
        key = (case.contract.name, case.workload.name, case.dtype, seed)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = None  # frees the last ones first
            self._drawn = key, case.contract.inputs(case.workload.params, case.dtype, self.device, seed)
        return self._drawn[1]

    def flops_per_us(self, dtype: torch.dtype) -> float:
        """Matrix rate of this run: a large square product of `dtype`, measured once."""
        if dtype not in self._flops_per_us:
            size = 8192 if self.device.type == "cuda" else 1024
            a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
            us = interleave({"matmul": lambda: a @ b.T}, device=self.device, rounds=7, warmup=2)["matmul"].median
            self._flops_per_us[dtype] = 2 * size**3 / us
        return self._flops_per_us[dtype]


class _Case:
    def __init__(self, bench: Bench, case: Case, seed: int) -> None:
        self.bench, self.case, self.device = bench, case, bench.device
        contract = case.contract
        self.sample = bench.sample(case, seed)
        self.cost: Cost = contract.cost(self.sample, case.direction)
        self.total = self.cost.bytes_read + self.cost.bytes_written
        self.launch_sized = launch_sized(self.total, self.device)
        self.sets = sets_for(self.total, self.device, at_most=_GRAPH_LAUNCHES)
        evicted = self.launch_sized or self.sets * self.total >= 2 * device_info(self.device).l2_bytes
        self.l2 = "cold" if evicted else "warm"
        self.peer_names: set[str] = set()
        self.left_out: list[Note] = []
        self.failures: list[Note] = []
        self.cotangents: list[Tensor] = []
        if case.direction == "bwd":
            self.cotangents = random_cotangents(reference_outputs(contract, self.sample, "fwd", ()), seed)
        self.judge = self._judge()

    def run(self) -> Measured:
        found = choice(self.case, self.sample, self.cotangents)
        field = contestants(self.case, found, self.device, self.bench.against)
        err = {c.name: e for c in field if (e := self._checked(c)) is not None}
        field = [c for c in field if c.name in err]
        self.peer_names = {c.name for c in field if not c.ours}
        if found.chosen not in err:
            return Measured(None, None, self.left_out, self.failures)
        prepared = [(c, self._sets(c)) for c in field]
        calls = {c.name: rotate(sets) for c, sets in prepared}
        timed, floor = self._time(calls)
        for contestant, sets in prepared:
            self._recheck(contestant, sets[0])
        self._not_faster_than(floor, timed)
        return self._result(found, field, timed, calls, floor, err)

    # Being right.

    def _judge(self) -> accuracy.Judge:
        contract, direction = self.case.contract, self.case.direction
        wide = [g.double() for g in self.cotangents]
        oracle = [t.detach() for t in reference_outputs(contract, accuracy.upcast(self.sample), direction, wide)]
        torchs = reference_outputs(contract, self.sample, direction, self.cotangents)
        return accuracy.Judge(oracle, torchs, contract.tolerance if direction == "fwd" else contract.gradient_tolerance)

    def _checked(self, contestant: Contestant) -> float | None:
        """Error of a first, untimed run; None, with a note, for one that may not be timed."""
        try:
            call = prepare(contestant, self.sample, self.case, self.cotangents)
            if call is None:
                self._note(contestant, "does not offer these options")
                return None
            right, err = self.judge(self._run(call))
        except Exception as error:  # noqa: BLE001  a peer may fail in any way it likes; the run goes on and says so
            self._note(contestant, f"{type(error).__name__}: {error}".splitlines()[0][:200])
            return None
        if not right:
            self._note(contestant, f"wrong before timing: relative error {err:.3g}, torch {self.judge.torch_error:.3g}")
            return None
        return err

    def _recheck(self, contestant: Contestant, call: Call) -> None:
        """After timing: ours must still be right on the very buffers that were timed.

        A peer that consumes its inputs, on fresh ones.
        """
        right, err = self.judge(self._run(call))
        if not right and not contestant.ours:
            fresh = prepare(contestant, self.sample, self.case, self.cotangents)
            assert fresh is not None, "it was prepared before"
            right, err = self.judge(self._run(fresh))
        if not right:
            self._note(contestant, f"wrong after timing: relative error {err:.3g}")

    def _note(self, contestant: Contestant, reason: str) -> None:
        note = Note(*self.case.key, contestant.name, reason)
        (self.failures if contestant.ours else self.left_out).append(note)

    # Being fast.

    def _run(self, call: Call) -> object:
        with self._mode():
            return call()

    def _mode(self) -> torch.inference_mode:
        """Forward as inference runs it, backward with gradients on."""
        return torch.inference_mode(self.case.direction == "fwd")

    def _sets(self, contestant: Contestant) -> list[Call]:
        made = (prepare(contestant, self.sample, self.case, self.cotangents) for _ in range(self.sets))
        return [call for call in made if call is not None]

    def _time(self, calls: dict[str, Call]) -> tuple[dict[str, Samples], float]:
        """(samples by name, floor in us), all from the same rounds."""
        read, written = self.cost.bytes_read, self.cost.bytes_written
        streams = {_PREFIX + k: call for k, call in floor_calls(read, written, self.device, sets=self.sets).items()}
        effort, everyone = self.bench.effort, {**calls, **streams}
        with self._mode():
            if self.launch_sized:
                replays = self._captured(everyone)
                timed = interleave_replays(
                    replays, device=self.device, launches=_GRAPH_LAUNCHES, rounds=effort.rounds, evict=True
                )
            else:
                timed = interleave(everyone, device=self.device, timing=self.bench.timing, rounds=effort.rounds)
        moved = {name.removeprefix(_PREFIX): timed.pop(name) for name in streams}
        floor = floor_us(moved, read, written, shared=self.device.type == "cpu")
        if self.cost.flops > _MATRIX_INTENSITY * self.total:
            floor = max(floor, self.cost.flops / self.bench.flops_per_us(self.case.dtype))
        return timed, floor

    def _captured(self, calls: dict[str, Call]) -> dict[str, Call]:
        """Graphs of everyone; a peer that cannot be captured is left out, and the reason noted."""
        replays: dict[str, Call] = {}
        for name, call in calls.items():
            try:
                replays[name] = capture(call, launches=_GRAPH_LAUNCHES, device=self.device)
            except RuntimeError as error:
                if name not in self.peer_names:
                    raise
                self.left_out.append(Note(*self.case.key, name, f"cannot be captured: {error}".splitlines()[0][:200]))
        return replays

    def _not_faster_than(self, floor: float, timed: dict[str, Samples]) -> None:
        for name, samples in timed.items():
            if samples.interval().high < _FLOOR_SHARE * floor - _FLOOR_SLACK_US:
                beside = f"{samples.median:.2f} us, floor {floor:.2f} us"
                reason = f"faster than its floor: {beside}; the bytes or the timing are miscounted"
                self.failures.append(Note(*self.case.key, name, reason))

    def _graph_us(self, call: Call, already: Samples) -> float | None:
        if self.launch_sized:
            return already.median
        if self.device.type != "cuda":
            return None
        with self._mode():
            timed = interleave_graphs(
                {"chosen": call}, device=self.device, launches=MIN_LAUNCHES, rounds=self.bench.effort.graph_rounds
            )
        return timed["chosen"].median

    # Writing it down.

    def _result(
        self,
        found: Choice,
        field: list[Contestant],
        timed: dict[str, Samples],
        calls: dict[str, Callable[[], object]],
        floor: float,
        err: dict[str, float],
    ) -> Measured:
        ours = {c.name: timed[c.name] for c in field if c.ours}
        peers = {name: timed[name] for name in self.peer_names if name in timed}
        own = _fastest({name: samples for name, samples in ours.items() if name != "torch"})
        peer = _fastest(peers)
        chosen = ours[found.chosen]
        with self._mode():
            eager = host_us(
                calls[found.chosen], device=self.device, rounds=self.bench.effort.host_rounds, calls=5
            ).median
        row = Row(
            *self.case.key[:2],
            params={k: _plain(v) for k, v in self.case.workload.params.items()},
            dtype=dtype_name(self.case.dtype),
            direction=self.case.direction,
            timing=self.bench.timing if not self.launch_sized else "sustained",
            l2=self.l2,
            impls={name: _us(samples.median) for name, samples in ours.items()},
            chosen=found.chosen,
            peers={name: _us(samples.median) for name, samples in peers.items()},
            floor_us=_us(floor),
            ratio_own=_ratio(peers, peer, ours, own),
            ratio_auto=_ratio(peers, peer, ours, found.chosen),
            eager_us=_us(eager),
            graph_us=None if (graph := self._graph_us(calls[found.chosen], chosen)) is None else _us(graph),
            err=_us(err[found.chosen], digits=4),
            err_peer=None if peer is None else _us(err[peer], digits=4),
            spread=_us(chosen.spread, digits=3),
        )
        return Measured(row, self._table_choice(found, ours), self.left_out, self.failures)

    def _table_choice(self, found: Choice, ours: dict[str, Samples]) -> TableChoice | None:
        """Fastest of ours that a table can ask for.

        Not torch in the backward: it is timed as torch's autograd, and under our forward it would recompute instead.
        """
        eligible = [n for n in found.names if n in ours and (self.case.direction == "fwd" or n != "torch")]
        if not eligible:
            return None
        best = min(eligible, key=lambda name: ours[name].median)
        plan = found.plans[best]
        config = None if plan.config is None else plan.config._asdict()  # a NamedTuple, by the order of kernel files
        torch_us = ours["torch"].median if "torch" in ours else None
        return TableChoice(
            op=found.raw.op,
            direction=self.case.direction,
            bucket=plan.bucket,
            dtype=plan.dtype,
            backend=best,
            config=config,
            us=_us(ours[best].median),
            noise=_us(ours[best].spread, digits=3),
            torch_us=None if torch_us is None else _us(torch_us),
        )


def launch_sized(total_bytes: int, device: torch.device) -> bool:
    """Is this so little traffic that only a graph shows the device's time?"""
    return device.type == "cuda" and total_bytes <= LAUNCH_SIZED_BYTES


def _fastest(samples: dict[str, Samples]) -> str | None:
    return min(samples, key=lambda name: samples[name].median) if samples else None


def _ratio(peers: dict[str, Samples], peer: str | None, ours: dict[str, Samples], name: str | None) -> float | None:
    """Best peer / ours, round by round: above 1 we are the faster one."""
    if peer is None or name is None:
        return None
    return _us(paired_ratio(peers[peer], ours[name]).value)


def _us(value: float, digits: int = 5) -> float:
    """Rounded to significant digits: more than five of a time are noise, and make result files large."""
    return (
        value
        if value == 0 or not math.isfinite(value)
        else round(value, digits - 1 - math.floor(math.log10(abs(value))))
    )


def _plain(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else value
