"""The one JSON form of every suite's results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tilewright.dispatch.tables import columns
from tilewright.errors import InputError

SCHEMA = 5
# Up to 4, a row has no commit. Up to 3, every row and every note is an object. Schema 1 has no paused times; those of 2
# include the host's waking time and are not read.
_READABLE = (1, 2, 3, 4, SCHEMA)
_PAUSED, _IN_COLUMNS = 3, 4
KIND = "bench"


@dataclass(frozen=True)
class Row:
    """One measured case. Times are median microseconds; device time on a GPU.

    params      the workload's sizes and options
    direction   "fwd", or "bwd": the backward alone
    timing      "sustained" or "paused"
    l2          "cold": inputs and outputs rotate through more than twice the cache; "warm" otherwise
    impls       ours by backend; `chosen` is the one that `auto` takes
    peers       eager torch, torch.compile, other libraries; wrong or failing ones are in Results.left_out
    floor_us    the case's bytes (or flops) at the ceiling measured with it
    ratio_own   best peer / best of ours, the torch backend excluded; None if either is missing
    ratio_auto  best peer / chosen
    eager_us    host time to enqueue one call of `chosen`; graph_us: its device time in a CUDA graph, None on a CPU
    err         relative Frobenius error of `chosen` against float64; err_peer: of the fastest peer
    spread      half the 95 % interval of `chosen`'s median, over the median
    paused      compute-bound rows: times of impls and peers with an idle gap before each call; ratio_own_paused: best
                peer / best of ours among them.  Empty and None where not measured, and then not in the file.
    commit      the commit it was measured at (`bench.commit`); empty, and then not in the file, where it is unknown
    """

    op: str
    case: str
    params: dict[str, Any]
    dtype: str
    direction: str
    timing: str
    l2: str
    impls: dict[str, float]
    chosen: str
    peers: dict[str, float]
    floor_us: float
    ratio_own: float | None
    ratio_auto: float | None
    eager_us: float
    graph_us: float | None
    err: float
    err_peer: float | None
    spread: float
    paused: dict[str, float] = field(default_factory=dict)
    ratio_own_paused: float | None = None
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """(op, case, dtype, direction)."""
        return self.op, self.case, self.dtype, self.direction


_COLUMNS = tuple(f.name for f in fields(Row))
_OPTIONAL = {f.name for f in fields(Row) if f.default is not MISSING or f.default_factory is not MISSING}


@dataclass(frozen=True)
class Note:
    """A case that failed, or a contestant that was left out of one, with the reason."""

    op: str
    case: str
    dtype: str
    direction: str
    name: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The tuning-table row of one case; not part of the JSON."""

    op: str
    direction: str
    bucket: str
    dtype: str
    backend: str
    config: dict[str, Any] | None
    us: float
    noise: float
    torch_us: float | None


@dataclass
class Results:
    """A run: machine block, rows, failures (they fail the run) and contestants left out (they do not).

    unbegun: number of cases that the budget left for another run; not part of the JSON.
    """

    suite: str
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    failures: list[Note] = field(default_factory=list)
    left_out: list[Note] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    unbegun: int = 0

    @property
    def ok(self) -> bool:
        """True if every declared case has a row and no row is in doubt."""
        return not self.failures

    def to_json(self) -> str:
        """JSON text: one line for each row, and each reason once with all its cases."""
        head = {
            "kind": KIND,
            "schema": SCHEMA,
            "suite": self.suite,
            "machine": self.machine,
            "failures": _grouped(self.failures),
            "left_out": _grouped(self.left_out),
        }
        return columns.text(head, map(_written, self.rows), _COLUMNS)

    def save(self, path: Path) -> None:
        """Write the JSON to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json())


def load(path: Path) -> Results:
    """Read a result file of this schema or an earlier one.

    Raises InputError, naming the file, for another kind or schema, or a row with other fields.
    """
    data = json.loads(path.read_text())
    if data.get("kind") != KIND or data.get("schema") not in _READABLE:
        raise InputError(
            f"{path}: kind {data.get('kind')!r}, schema {data.get('schema')!r}; "
            f"this version reads {KIND!r}, {' or '.join(map(str, _READABLE))}. Measure it again."
        )
    if data["schema"] >= _IN_COLUMNS:
        try:
            data["rows"] = columns.rows(data, _OPTIONAL)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from None
    for i, row in enumerate(data["rows"]):
        if not set(_COLUMNS) - _OPTIONAL <= set(row) <= set(_COLUMNS):
            raise InputError(f"{path}: row {i} has fields {sorted(row)}, expected {sorted(_COLUMNS)}.")
    if data["schema"] < _PAUSED:
        data["rows"] = [{name: row[name] for name in row if name not in _OPTIONAL} for row in data["rows"]]
    return Results(
        suite=data["suite"],
        machine=data["machine"],
        rows=[Row(**row) for row in data["rows"]],
        failures=_notes(data["failures"]),
        left_out=_notes(data["left_out"]),
    )


_SAME_MACHINE = ("device", "arch", "driver", "cuda", "torch", "triton")


def check_same_machine(old: Results, machine: Mapping[str, Any], path: Path) -> None:
    """Raise InputError if rows measured on `machine` may not join those of `old`, read from `path`."""
    other = [
        f"{name} {old.machine.get(name)!r}, here {machine.get(name)!r}"
        for name in _SAME_MACHINE
        if old.machine.get(name) != machine.get(name)
    ]
    if other:
        raise InputError(f"{path}: rows of another machine cannot be added to: {'; '.join(other)}.")


def appended(old: Results, new: Results) -> Results:
    """Merge two runs on one machine: the cases of `new` replace the same cases of `old`.

    The machine block is that of `new`; every row has its own floor.
    """
    measured = {row.key for row in new.rows} | {_case_of(note) for note in (*new.failures, *new.left_out)}
    return Results(
        suite=new.suite if new.suite == old.suite else "all",
        machine=new.machine,
        rows=[row for row in old.rows if row.key not in measured] + new.rows,
        failures=[note for note in old.failures if _case_of(note) not in measured] + new.failures,
        left_out=[note for note in old.left_out if _case_of(note) not in measured] + new.left_out,
        choices=new.choices,
    )


def missing(declared: Iterable[tuple[str, str, str, str]], results: Results) -> list[Note]:
    """A failure for every declared (op, case, dtype, direction) that has neither a row nor a failure yet."""
    present = {row.key for row in results.rows} | {_case_of(note) for note in results.failures}
    return [Note(*key, name="", reason="declared workload was not measured") for key in declared if key not in present]


def _written(row: Row) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name not in _OPTIONAL or value}


def _grouped(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Merge notes that differ only in their case into one with all `cases`."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for n in notes:
        cases.setdefault((n.op, n.dtype, n.direction, n.name, n.reason), []).append(n.case)
    names = ("op", "dtype", "direction", "name", "reason")
    return [{**dict(zip(names, shared, strict=True)), "cases": case_names} for shared, case_names in cases.items()]


def _notes(written: Iterable[Mapping[str, Any]]) -> list[Note]:
    """One note for each case, from either form."""
    notes = []
    for note in written:
        shared = {name: value for name, value in note.items() if name not in ("case", "cases")}
        notes += [Note(case=case, **shared) for case in note.get("cases") or [note["case"]]]
    return notes


def _case_of(note: Note) -> tuple[str, str, str, str]:
    return note.op, note.case, note.dtype, note.direction
