"""One case from its inputs to its row."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

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
from tilewright.bench.matrix import SHARE as MATRIX_SHARE
from tilewright.bench.measure.row import Times, row, table_choice
from tilewright.bench.measure.shared import Shared
from tilewright.bench.pacing import MAX_LAUNCHES, graph_launches
from tilewright.bench.peers import Call
from tilewright.bench.rotation import rotate, sets_for
from tilewright.bench.schema import Choice as TableChoice
from tilewright.bench.schema import Note, Row
from tilewright.bench.statistics import Samples
from tilewright.bench.timing import host_us, interleave
from tilewright.dispatch import Cost
from tilewright.errors import KernelMissingError
from tilewright.hardware import device_info

# torch's and Triton's streams agree to a few percent; a tenth below the floor is no scheduling luck
_FLOOR_SHARE = 0.9
_FLOOR_SLACK_US = 0.3  # resolution of an event pair
_MATRIX_INTENSITY = 8  # flops a byte; under it every processor with matrix units is bound by traffic
# Where flops take this many times as long as reading all the bytes, no mix of traffic is the floor
_CLEARLY_COMPUTE = 2
_LONG_US, _HOPELESS = 50_000.0, 20.0  # drop contestants slower than 50 ms and 20 times the fastest
_GRAPH_TELLS_US = 1000.0  # a graph of longer calls gives the same time, and twenty launches take long
_PREFIX = "floor:"


@dataclass
class Measured:
    """A case's row, and notes. There is no row if the backend that `auto` picks is wrong; `failures` says so."""

    row: Row | None
    table: TableChoice | None
    left_out: list[Note]
    failures: list[Note]


def measure(shared: Shared, case: Case, seed: int = 0) -> Measured:
    """Check, time and check again; contestants that fail become notes."""
    return _Case(shared, case, seed).run()


def compile_all(shared: Shared, case: Case, seed: int = 0) -> None:
    """Run every contestant once, checked and not timed: what they compile is then in the caches on disk.

    What fails here fails again, and is noted, where the case is measured.
    """
    _Case(shared, case, seed).field()


class _Case:
    def __init__(self, shared: Shared, case: Case, seed: int) -> None:
        self.shared, self.case, self.device = shared, case, shared.device
        contract = case.contract
        self.sample = shared.sample(case, seed)
        self.cost: Cost = contract.cost(self.sample, case.direction)
        self.total = self.cost.bytes_read + self.cost.bytes_written
        self.traffic_us = self.total / shared.bytes_per_us
        matrix = self.cost.flops > _MATRIX_INTENSITY * self.total
        self.matrix_us = self.cost.flops / shared.flops_per_us(case.dtype) if matrix else 0.0
        predicted, inference = max(self.traffic_us, self.matrix_us), "bwd" not in case.workload.directions
        self.launches = graph_launches(self.total, predicted, self.device, inference=inference)
        self.sets = sets_for(self.total, self.device, at_most=self.launches or MAX_LAUNCHES)
        evicted = self.launches is not None or self.sets * self.total >= 2 * device_info(self.device).l2_bytes
        self.l2 = "cold" if evicted else "warm"
        self.peer_names: set[str] = set()
        self.left_out: list[Note] = []
        self.failures: list[Note] = []
        self.cotangents: list[Tensor | None] = []
        if case.direction == "bwd":
            self.cotangents = random_cotangents(reference_outputs(contract, self.sample, "fwd", ()), seed)
        self.judge = self._judge()

    def run(self) -> Measured:
        selection, field, err = self.field()
        self.peer_names = {c.name for c in field if not c.ours}
        if selection.chosen not in err:
            return Measured(None, None, self.left_out, self.failures)
        prepared = self._without_slow([(c, self._sets(c)) for c in field], selection.chosen)
        field = [c for c, _ in prepared]
        calls = {c.name: rotate(sets) for c, sets in prepared}
        timed, floor = self._time(calls)
        paused = self._paused(calls, floor)
        for contestant, sets in prepared:
            self._recheck(contestant, sets[0])
        self._not_faster_than(floor, timed)
        ours = {c.name: timed[c.name] for c in field if c.ours}
        peers = {c.name: timed[c.name] for c in field if c.name in timed and not c.ours}
        return self._result(selection, Times(ours, peers, floor, paused), calls[selection.chosen], err)

    def field(self) -> tuple[Choice, list[Contestant], dict[str, float]]:
        """What `auto` takes, the contestants that are right in a first run, and the error of each."""
        selection = choice(self.case, self.sample, self.cotangents)
        field = contestants(self.case, selection, self.device, self.shared.against)
        if self.shared.only_chosen:
            field = [c for c in field if not c.ours or c.name == selection.chosen]
        err = {c.name: e for c in field if (e := self._check_first(c)) is not None}
        return selection, [c for c in field if c.name in err], err

    # Correctness.

    def _judge(self) -> accuracy.Judge:
        contract, direction = self.case.contract, self.case.direction
        grads_fp64 = [None if g is None else g.double() for g in self.cotangents]
        oracle = [t.detach() for t in reference_outputs(contract, accuracy.upcast(self.sample), direction, grads_fp64)]
        torchs = reference_outputs(contract, self.sample, direction, self.cotangents)
        factor = contract.tolerance if direction == "fwd" else contract.widest_gradient_tolerance
        return accuracy.Judge(oracle, torchs, factor)

    def _check_first(self, contestant: Contestant) -> float | None:
        """Error of a first, untimed run; None, with a note, for a contestant that is wrong or fails."""
        try:
            call = prepare(contestant, self.sample, self.case, self.cotangents)
            if call is None:
                self._note(contestant, "does not offer these options")
                return None
            correct, err = self._judged(contestant, call)
        except KernelMissingError as error:  # a compiler is missing, which is no fault of the kernel
            self.left_out.append(Note(*self.case.key, contestant.name, str(error).splitlines()[0][:200]))
            return None
        except Exception as error:  # noqa: BLE001  a peer may fail in any way it likes; the run goes on and says so
            self._note(contestant, f"{type(error).__name__}: {error}".splitlines()[0][:200])
            return None
        if not correct:
            self._note(contestant, f"wrong before timing: relative error {err:.3g}, torch {self.judge.torch_error:.3g}")
            return None
        return err

    def _recheck(self, contestant: Contestant, call: Call) -> None:
        """Check again after timing, ours on the very buffers that were timed.

        A contestant that may overwrite its inputs (a peer, or an op that adds in place) is checked on fresh ones.
        """
        correct, err = self._judged(contestant, call)
        if not correct and (not contestant.ours or self.case.workload.into is not None):
            fresh = prepare(contestant, self.sample, self.case, self.cotangents)
            assert fresh is not None, "it was prepared before"
            correct, err = self._judged(contestant, fresh)
        if not correct:
            self._note(contestant, f"wrong after timing: relative error {err:.3g}")

    def _judged(self, contestant: Contestant, call: Call) -> tuple[bool, float]:
        """(right enough, relative error) of a run."""
        outputs = self._run(call)
        return self.judge(outputs) if contestant.judge is None else (contestant.judge(self.sample, outputs), 0.0)

    def _note(self, contestant: Contestant, reason: str) -> None:
        note = Note(*self.case.key, contestant.name, reason)
        (self.failures if contestant.ours else self.left_out).append(note)

    # Timing.

    def _run(self, call: Call) -> object:
        with self._mode():
            return call()

    def _mode(self) -> torch.inference_mode:
        """Forward as inference runs it, backward with gradients on."""
        return torch.inference_mode(self.case.direction == "fwd")

    def _sets(self, contestant: Contestant) -> list[Call]:
        calls = (prepare(contestant, self.sample, self.case, self.cotangents) for _ in range(self.sets))
        return [call for call in calls if call is not None]

    def _without_slow(
        self, prepared: list[tuple[Contestant, list[Call]]], chosen: str
    ) -> list[tuple[Contestant, list[Call]]]:
        """Drop contestants far slower than the fastest (`_LONG_US`, `_HOPELESS`), unless `auto` picks them."""
        single_us = {c.name: self._wall_us(sets[0]) for c, sets in prepared}
        fastest_us = min(single_us.values())
        remaining = []
        for contestant, sets in prepared:
            us = single_us[contestant.name]
            if us > max(_LONG_US, _HOPELESS * fastest_us):
                us = min(us, self._wall_us(sets[0]))
            if us > max(_LONG_US, _HOPELESS * fastest_us) and contestant.name != chosen:
                reason = f"{us / 1e3:.0f} ms in one call, over {_HOPELESS:.0f} times the fastest: not interleaved"
                self.left_out.append(Note(*self.case.key, contestant.name, reason))
            else:
                remaining.append((contestant, sets))
        return remaining

    def _wall_us(self, call: Call) -> float:
        """Wall time of one call in microseconds."""
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        synchronize()
        began = perf_counter()
        self._run(call)
        synchronize()
        return (perf_counter() - began) * 1e6

    def _time(self, calls: dict[str, Call]) -> tuple[dict[str, Samples], float]:
        """(samples by name, floor in us), all from the same rounds."""
        read, written = self.cost.bytes_read, self.cost.bytes_written
        streams: dict[str, Call] = {}
        if self.matrix_us < _CLEARLY_COMPUTE * self.traffic_us:
            streams = {_PREFIX + k: call for k, call in floor_calls(read, written, self.device, sets=self.sets).items()}
        effort, timed_calls = self.shared.effort, {**calls, **streams}
        with self._mode():
            if self.launches is not None:
                timed = interleave_replays(
                    self._captured(timed_calls, self.launches),
                    device=self.device,
                    launches=self.launches,
                    rounds=effort.rounds,
                    evict=True,
                )
            else:
                timed = interleave(
                    timed_calls,
                    device=self.device,
                    timing=self.shared.timing,
                    rounds=effort.rounds,
                    limit_s=effort.row_s,
                )
        streamed = {name.removeprefix(_PREFIX): timed.pop(name) for name in streams}
        floor = floor_us(streamed, read, written, shared=self.device.type == "cpu") if streamed else 0.0
        return timed, max(floor, self.matrix_us)

    def _paused(self, calls: dict[str, Call], floor: float) -> dict[str, Samples]:
        """Time compute-bound cases again, one call a sample after an idle gap: full clocks, no power limit."""
        effort = self.shared.effort
        sustained = self.launches is None and self.shared.timing == "sustained"
        if not (sustained and effort.paused_rounds and floor == self.matrix_us):
            return {}
        with self._mode():
            return interleave(
                calls,
                device=self.device,
                timing="paused",
                rounds=effort.paused_rounds,
                warmup=1,
                sample_us=1.0,
                limit_s=effort.row_s,
            )

    def _captured(self, calls: dict[str, Call], launches: int) -> dict[str, Call]:
        """Graphs of all contestants; a peer that cannot be captured is left out, with a note."""
        replays: dict[str, Call] = {}
        for name, call in calls.items():
            try:
                replays[name] = capture(call, launches=launches, device=self.device)
            except RuntimeError as error:
                if name not in self.peer_names:
                    raise
                self.left_out.append(Note(*self.case.key, name, f"cannot be captured: {error}".splitlines()[0][:200]))
        return replays

    def _not_faster_than(self, floor: float, timed: dict[str, Samples]) -> None:
        share = MATRIX_SHARE if floor == self.matrix_us else _FLOOR_SHARE
        for name, samples in timed.items():
            if samples.interval().high < share * floor - _FLOOR_SLACK_US:
                times = f"{samples.median:.2f} us, floor {floor:.2f} us"
                reason = f"faster than its floor: {times}; the bytes or the timing are miscounted"
                self.failures.append(Note(*self.case.key, name, reason))

    def _graph_us(self, call: Call, already: Samples) -> float | None:
        if self.launches is not None:
            return already.median
        if self.device.type != "cuda" or already.median > _GRAPH_TELLS_US:
            return None
        with self._mode():
            timed = interleave_graphs(
                {"chosen": call}, device=self.device, launches=MIN_LAUNCHES, rounds=self.shared.effort.graph_rounds
            )
        return timed["chosen"].median

    def _result(self, selection: Choice, times: Times, chosen: Call, err: dict[str, float]) -> Measured:
        with self._mode():
            host = host_us(chosen, device=self.device, rounds=self.shared.effort.host_rounds, calls=5).median
        result_row = row(
            self.case,
            times,
            chosen=selection.chosen,
            timing="sustained" if self.launches is not None else self.shared.timing,
            l2=self.l2,
            host_us=host,
            graph_us=self._graph_us(chosen, times.ours[selection.chosen]),
            err=err,
        )
        return Measured(result_row, table_choice(self.case, selection, times.ours), self.left_out, self.failures)
