"""One case: check everybody, time everybody and the floor in the same rounds, check again, make the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
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
from tilewright.bench.graph import MIN_LAUNCHES, interleave_graphs
from tilewright.bench.peers import Call
from tilewright.bench.rotation import rotate, sets_for
from tilewright.bench.schema import Choice as TableChoice
from tilewright.bench.schema import Note, Row
from tilewright.bench.statistics import Samples, paired_ratio
from tilewright.bench.timing import Timing, host_us, interleave
from tilewright.dispatch import Cost, Sample
from tilewright.errors import VerificationError
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
    """A case's row and what else there is to say about it."""

    row: Row
    table: TableChoice
    left_out: list[Note]
    failures: list[Note]


class Bench:
    """Measures cases on one device with one setting, keeping what cases share (matrix rates)."""

    def __init__(self, device: torch.device, timing: Timing, effort: Effort, against: Sequence[str] | None) -> None:
        self.device, self.timing, self.effort, self.against = device, timing, effort, against
        self._flops_per_us: dict[torch.dtype, float] = {}

    def measure(self, case: Case, seed: int = 0) -> Measured:
        """Raises VerificationError when every implementation of ours is wrong or refuses."""
        return _Case(self, case, seed).run()

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
        self.sample: Sample = contract.inputs(case.workload.params, case.dtype, self.device, seed)
        self.cost: Cost = contract.cost(self.sample, case.direction)
        self.total = self.cost.bytes_read + self.cost.bytes_written
        self.launch_sized = self.device.type == "cuda" and self.total <= LAUNCH_SIZED_BYTES
        self.left_out: list[Note] = []
        self.failures: list[Note] = []
        self.cotangents: list[Tensor] = []
        if case.direction == "bwd":
            self.cotangents = random_cotangents(reference_outputs(contract, self.sample, "fwd", ()), seed)
        self.oracle, self.torch_errors, self.dtypes = self._oracle()

    def run(self) -> Measured:
        found = choice(self.case, self.sample, self.cotangents)
        field = contestants(self.case, found, self.device, self.bench.against)
        err = {c.name: e for c in field if (e := self._checked(c)) is not None}
        field = [c for c in field if c.name in err]
        if not any(c.ours for c in field):
            raise VerificationError(
                f"no implementation of {self.case.contract.name} passed: " + "; ".join(n.reason for n in self.failures)
            )
        prepared = [(c, self._sets(c)) for c in field]
        calls = {c.name: rotate(sets) for c, sets in prepared}
        timed, floor = self._time(calls)
        for contestant, sets in prepared:
            self._recheck(contestant, sets[0])
        self._not_faster_than(floor, timed)
        return self._result(found, field, timed, calls, floor, err)

    # Being right.

    def _oracle(self) -> tuple[list[Tensor], list[accuracy.Error], list[torch.dtype]]:
        contract, direction = self.case.contract, self.case.direction
        wide = [g.double() for g in self.cotangents]
        oracle = [t.detach() for t in reference_outputs(contract, accuracy.upcast(self.sample), direction, wide)]
        same_dtype = reference_outputs(contract, self.sample, direction, self.cotangents)
        return oracle, accuracy.errors(same_dtype, oracle), [t.dtype for t in same_dtype]

    def _judge(self, outputs: object) -> tuple[bool, float]:
        contract = self.case.contract
        factor = contract.tolerance if self.case.direction == "fwd" else contract.gradient_tolerance
        found = accuracy.errors(accuracy.tensors(outputs), self.oracle)
        return accuracy.passes(found, self.torch_errors, self.oracle, self.dtypes, factor), accuracy.worst(found)

    def _checked(self, contestant: Contestant) -> float | None:
        """Error of a first, untimed run; None, with a note, for one that may not be timed."""
        try:
            call = prepare(contestant, self.sample, self.case, self.cotangents)
            if call is None:
                self._note(contestant, "does not offer these options")
                return None
            right, err = self._judge(self._run(call))
        except Exception as error:  # noqa: BLE001  a peer may fail in any way it likes; the run goes on and says so
            self._note(contestant, f"{type(error).__name__}: {error}".splitlines()[0][:200])
            return None
        if not right:
            self._note(
                contestant,
                f"wrong before timing: relative error {err:.3g}, torch {accuracy.worst(self.torch_errors):.3g}",
            )
            return None
        return err

    def _recheck(self, contestant: Contestant, call: Call) -> None:
        """After timing: ours must still be right on the very buffers that were timed.

        A peer that consumes its inputs, on fresh ones.
        """
        right, err = self._judge(self._run(call))
        if not right and not contestant.ours:
            fresh = prepare(contestant, self.sample, self.case, self.cotangents)
            assert fresh is not None, "it was prepared before"
            right, err = self._judge(self._run(fresh))
        if not right:
            self._note(contestant, f"wrong after timing: relative error {err:.3g}")

    def _note(self, contestant: Contestant, reason: str) -> None:
        note = Note(*self.case.key, contestant.name, reason)
        (self.failures if contestant.ours else self.left_out).append(note)

    # Being fast.

    def _run(self, call: Call) -> object:
        if self.case.direction == "bwd":
            return call()
        with torch.no_grad():
            return call()

    def _sets(self, contestant: Contestant) -> list[Call]:
        count = sets_for(self.total, self.device, at_most=_GRAPH_LAUNCHES if self.launch_sized else 32)
        made = (prepare(contestant, self.sample, self.case, self.cotangents) for _ in range(count))
        return [call for call in made if call is not None]

    def _time(self, calls: dict[str, Call]) -> tuple[dict[str, Samples], float]:
        """(samples by name, floor in us), all from the same rounds."""
        streams = {
            _PREFIX + name: call
            for name, call in floor_calls(
                self.cost.bytes_read,
                self.cost.bytes_written,
                self.device,
                sets=sets_for(self.total, self.device, at_most=_GRAPH_LAUNCHES),
            ).items()
        }
        effort, everyone = self.bench.effort, {**calls, **streams}
        with torch.set_grad_enabled(self.case.direction == "bwd"):
            if self.launch_sized:
                timed = interleave_graphs(everyone, device=self.device, launches=_GRAPH_LAUNCHES, rounds=effort.rounds)
            else:
                timed = interleave(everyone, device=self.device, timing=self.bench.timing, rounds=effort.rounds)
        moved = {name.removeprefix(_PREFIX): timed.pop(name) for name in streams}
        floor = floor_us(moved, self.cost.bytes_read, self.cost.bytes_written)
        if self.cost.flops > _MATRIX_INTENSITY * self.total:
            floor = max(floor, self.cost.flops / self.bench.flops_per_us(self.case.dtype))
        return timed, floor

    def _not_faster_than(self, floor: float, timed: dict[str, Samples]) -> None:
        for name, samples in timed.items():
            if samples.interval().high < _FLOOR_SHARE * floor - _FLOOR_SLACK_US:
                reason = f"faster than its floor: {samples.median:.2f} us, floor {floor:.2f} us; the bytes or the timing are miscounted"
                self.failures.append(Note(*self.case.key, name, reason))

    def _graph_us(self, call: Call, already: Samples) -> float | None:
        if self.launch_sized:
            return already.median
        if self.device.type != "cuda":
            return None
        with torch.set_grad_enabled(self.case.direction == "bwd"):
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
        peers = {c.name: timed[c.name] for c in field if not c.ours}
        own = _fastest({name: samples for name, samples in ours.items() if name != "torch"})
        peer = _fastest(peers)
        if found.chosen not in ours:
            raise VerificationError(f"{self.case.contract.name}: auto picks {found.chosen}, which did not pass")
        chosen = ours[found.chosen]
        with torch.set_grad_enabled(self.case.direction == "bwd"):
            eager = host_us(
                calls[found.chosen], device=self.device, rounds=self.bench.effort.host_rounds, calls=5
            ).median
        row = Row(
            *self.case.key[:2],
            params={k: _plain(v) for k, v in self.case.workload.params.items()},
            dtype=dtype_name(self.case.dtype),
            direction=self.case.direction,
            timing=self.bench.timing if not self.launch_sized else "sustained",
            l2="cold",
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

    def _table_choice(self, found: Choice, ours: dict[str, Samples]) -> TableChoice:
        """Fastest of ours. In the backward torch is left out.

        A torch backward under our forward recomputes, which is not what was timed.
        """
        eligible = {n: s for n, s in ours.items() if self.case.direction == "fwd" or n != "torch"} or ours
        best = min(eligible, key=lambda name: eligible[name].median)
        plan = found.plans[best]
        config = asdict(plan.config) if is_dataclass(plan.config) and not isinstance(plan.config, type) else plan.config
        torch_us = ours["torch"].median if "torch" in ours else None
        return TableChoice(
            op=found.raw.op,
            direction=self.case.direction,
            bucket=plan.bucket,
            dtype=plan.dtype,
            backend=best,
            config=config,
            us=_us(eligible[best].median),
            noise=_us(eligible[best].spread, digits=3),
            torch_us=None if torch_us is None else _us(torch_us),
        )


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
