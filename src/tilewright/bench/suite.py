"""Run a suite: every declared case of an op family, on this device, into one `Results`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tilewright.bench import machine
from tilewright.bench.calibrate import headline
from tilewright.bench.cases import Case, select
from tilewright.bench.measure import Effort, Shared, compile_all, measure
from tilewright.bench.peers import check_names
from tilewright.bench.schema import Note, Results, Row, missing
from tilewright.bench.timing import Timing
from tilewright.hardware import device_info
from tilewright.log import logger

Progress = Callable[[str], None]

_GPU = Effort(rounds=25, graph_rounds=7, host_rounds=10, paused_rounds=7)
_CPU = Effort(rounds=9, graph_rounds=0, host_rounds=5)
_ANY_RATE = 1000.0
"""GB/s where nothing is timed: it decides only how many copies of the inputs a case would rotate through."""


def run(
    suite: str,
    ops: Sequence[str] | None = None,
    dtype: str | None = None,
    case: Mapping[str, Any] | None = None,
    against: Sequence[str] | None = None,
    *,
    rows: Sequence[str] | None = None,
    cases: Sequence[Case] | None = None,
    direction: str | None = None,
    without: Collection[tuple[str, ...]] = (),
    budget: float | None = None,
    device: torch.device | str | None = None,
    timing: Timing = "sustained",
    only_chosen: bool = False,
    progress: Progress | None = None,
    keep: Callable[[Results], None] | None = None,
) -> Results:
    """Measure every implementation of ours and every available peer on the cases of `suite`.

    suite: an op family ("norm", "activation", "rope", ...) or "all". ops, dtype, case, rows: see `cases.select`.
    cases: measured instead of those that `suite` declares; then `suite` only names the results.
    direction: "fwd" or "bwd" alone. against: names of the peers to run; None runs all. without: keys of cases to leave
    out. budget: seconds after which no case is begun, those of the ceilings among them; what was left, then or by an
    interruption, stands in `Results.unbegun`. timing: "sustained" or "paused". only_chosen: of our implementations, the
    one that `auto` takes. progress: gets one line of text a row. keep: gets the results after every case, for a run
    that may be killed. Raises UsageError for names that do not exist. A case that fails is recorded in
    `Results.failures`, and the run goes on.
    """
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    say = progress or (lambda line: None)
    if cases is None:
        cases = select(suite, ops=ops, dtype=dtype, case=case, rows=rows, device=target)
    chosen = [item for item in cases if item.key not in without and direction in (None, item.direction)]
    if against is not None:
        check_names({item.contract.name: item.contract for item in chosen}.values(), target, against)
    began = time.monotonic()
    with _side_stream(target), _repeatable_backward():
        before = machine.clocks(target)
        ceilings = headline(target)
        effort = _GPU if target.type == "cuda" else _CPU
        shared = Shared(target, timing, effort, against, ceilings["read_gb_s"], only_chosen)
        results = Results(suite, machine.describe(target, before=before, ceilings=ceilings).to_dict())
        say(
            f"{len(chosen)} cases on {device_info(target).name}; "
            + ", ".join(f"{k} {v:g}" for k, v in ceilings.items())
        )
        say(HEADER)
        begun = 0
        try:
            for item in chosen:
                if budget is not None and time.monotonic() - began >= budget:
                    break
                _one(shared, item, results, say)
                begun += 1
                if keep is not None:
                    keep(results)
        except KeyboardInterrupt:  # keep the rows measured so far
            say("interrupted")
        say(f"{len(results.rows)} rows in {time.monotonic() - began:.0f} s")
    results.unbegun = len(chosen) - begun
    results.failures += missing([item.key for item in chosen[:begun]], results)
    results.machine = machine.describe(target, before=before, after=machine.clocks(target), ceilings=ceilings).to_dict()
    return results


def compile_first(
    cases: Sequence[Case], against: Sequence[str] | None, device: torch.device | str, only_chosen: bool
) -> None:
    """Run every contestant of the cases once, untimed, so that a run in another process finds what they compiled."""
    device = torch.device(device)
    shared = Shared(device, "sustained", _GPU, against, _ANY_RATE, only_chosen)
    with _side_stream(device), _repeatable_backward():
        for item in cases:
            try:
                compile_all(shared, item)
            except Exception as error:  # noqa: BLE001  the run that measures meets it again, and reports it
                logger.info("%s: %s while compiling", " ".join(item.key), type(error).__name__)
            finally:
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


HEADER = (
    f"{'op case dtype direction':<48} {'chosen':>8} {'us':>9} {'floor':>9} {'of it':>6}  {'best peer':<14}{'us':>9} "
    f"{'own':>6} {'auto':>6} {'host':>6} {'took':>5}"
)


def line(row: Row, seconds: float) -> str:
    """One row of the table that is printed while a suite runs; `seconds` it took to measure."""
    name = f"{row.op} {row.case} {row.dtype} {row.direction}"
    us = row.impls[row.chosen]
    peer = min(row.peers, key=lambda each: row.peers[each], default="")
    peer_us = f"{row.peers[peer]:>9.2f}" if peer else f"{'-':>9}"
    return (
        f"{name:<48} {row.chosen:>8} {us:>9.2f} {row.floor_us:>9.2f} {100 * row.floor_us / us:>5.0f}%  "
        f"{peer:<14}{peer_us} {_number(row.ratio_own)} {_number(row.ratio_auto)} {row.eager_us:>6.1f} "
        f"{seconds:>4.1f}s"
    )


def _one(shared: Shared, item: Case, results: Results, say: Progress) -> None:
    began = time.monotonic()
    try:
        measured = measure(shared, item)
    except Exception as error:  # noqa: BLE001  one broken case must not cost the others; it fails the run by name
        results.failures.append(Note(*item.key, "", f"{type(error).__name__}: {error}".splitlines()[0][:300]))
        say(f"{' '.join(item.key)}: FAILED, {results.failures[-1].reason}")
        return
    finally:
        gc.collect()
        if shared.device.type == "cuda":
            torch.cuda.empty_cache()
    if measured.row is not None:
        results.rows.append(measured.row)
        say(line(measured.row, time.monotonic() - began))
    if measured.table is not None:
        results.choices.append(measured.table)
    results.failures += measured.failures
    results.left_out += measured.left_out
    for note in (*measured.failures, *measured.left_out):
        say(f"    {' '.join(item.key)}, {note.name}: {note.reason}")


def _number(ratio: float | None) -> str:
    return f"{ratio:>6.3f}" if ratio is not None else f"{'-':>6}"


def _side_stream(device: torch.device) -> Any:
    """Run the block on one side stream.

    Autograd replays a backward on its forward's stream, and the default stream cannot be captured.
    """
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


@contextmanager
def _repeatable_backward() -> Iterator[None]:
    """Keep torch.compile's backward from writing into its saved tensors, which a repeated backward reads again."""
    import torch._functorch.config as functorch

    with functorch.patch(donated_buffer=False):
        yield
