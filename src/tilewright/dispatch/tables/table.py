"""Measured tables: which backend and configuration was fastest, on which GPU.  `bench` and `tuning` fill them.

A table is JSON: `{"schema": 2, "gpu", "arch", "sm_count", "versions", "date", "common", "columns", "rows"}`, as
`columns` describes; in schema 1 a row is an object.  A row is op, direction, bucket, dtype, numerics, backend, config,
us, noise, torch_us; where known runner_up, the best of the other backends, `{"backend", "config", "us"}`; date and
versions where they are not the table's.
Tables are read from the package, then the user's cache folder, then `TILEWRIGHT_TUNING_TABLE`, then those that
`tables.extra` holds in force; later ones win.  In the two folders a table is a file, or a folder with one file an op,
`nvidia-h200/rms_norm.json`: a look-up reads that of its op alone.  A file that must not be used is left out with one
log line, which says why; only the variable's own file raises.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.dispatch.registry import GENERATION
from tilewright.dispatch.tables import columns, extra
from tilewright.errors import TableError
from tilewright.hardware import DeviceInfo
from tilewright.log import log_once
from tilewright.settings import Settings, current

SCHEMA = 2
KEY = ("op", "direction", "bucket", "dtype", "numerics")
"""What identifies a row."""

_HEADER = {"gpu": str, "arch": str, "sm_count": int, "versions": dict, "date": str}
_NUMBER = (int, float)
_FIELDS: dict[str, Any] = {
    **dict.fromkeys((*KEY, "backend"), str),
    "config": (dict, type(None)),
    "us": _NUMBER,
    "noise": _NUMBER,
    "torch_us": (*_NUMBER, type(None)),
}
_OPTIONAL: dict[str, Any] = {"runner_up": (dict, type(None)), "date": str, "versions": dict}
COLUMNS = (*_FIELDS, *_OPTIONAL)
_RUNNER_UP = {name: _FIELDS[name] for name in ("backend", "config", "us")}


@dataclass(frozen=True)
class Other:
    """The best of the backends that did not win a row: what runs where the winner cannot."""

    backend: str
    config: Mapping[str, Any] | None
    us: float


@dataclass(frozen=True)
class Row:
    """One measured choice.  Times are microseconds of device time; `noise` is a fraction of `us`.

    versions  those of the driver, torch, compilers and this library at that time
    shipped   it comes with the package
    """

    op: str
    direction: str
    bucket: str
    dtype: str
    numerics: str
    backend: str
    config: Mapping[str, Any] | None
    us: float
    noise: float
    torch_us: float | None
    gpu: str
    date: str
    source: str
    runner_up: Other | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    shipped: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """(op, direction, bucket, dtype, numerics)."""
        return self.op, self.direction, self.bucket, self.dtype, self.numerics

    @property
    def choices(self) -> "tuple[Row | Other, ...]":
        """What was measured, best first."""
        return (self,) if self.runner_up is None else (self, self.runner_up)


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """(file with a dict for each row, rows) of one table.  Raises TableError for an unreadable file, another schema, a
    malformed row.
    """
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: not JSON ({error}).") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read ({error.strerror}).") from None
    if not isinstance(data, dict):
        raise TableError(f"{path}: holds a {type(data).__name__}, not a table.")
    if data.get("schema") not in (1, SCHEMA):
        raise TableError(
            f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}. Measure it again: tilewright tune."
        )
    in_columns = {"common": dict, "columns": list} if data["schema"] == SCHEMA else {}
    _check(f"{path}: the table", data, {**_HEADER, **in_columns}, {"schema": int, "rows": list})
    if in_columns:
        data["rows"] = _from_columns(path, data)
    rows = []
    shipped = path.is_relative_to(folders()[0])
    for i, row in enumerate(data.get("rows", [])):
        _check(f"{path}: row {i}", row, _FIELDS, _OPTIONAL)
        dated = {"date": data["date"], "versions": data["versions"], **row}
        fields = {**dated, "gpu": data["gpu"], "source": path.name, "shipped": shipped}
        if row.get("runner_up") is not None:
            _check(f"{path}: runner_up of row {i}", row["runner_up"], _RUNNER_UP, {})
            fields["runner_up"] = Other(**row["runner_up"])
        rows.append(Row(**fields))
    return data, rows


def _from_columns(path: Path, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return columns.rows({"rows": [], **data}, _OPTIONAL)
    except ValueError as error:
        raise TableError(f"{path}: {error}") from None


def _check(what: str, fields: Any, needed: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """Raise TableError unless `fields` has the needed names, no others but the optional ones, and their types."""
    if not isinstance(fields, dict) or not set(needed) <= set(fields) <= {*needed, *optional}:
        names = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise TableError(f"{what} has fields {names}, expected {sorted(needed)}.")
    for name, value in fields.items():
        expected = needed.get(name, optional.get(name))
        if not isinstance(value, expected) or isinstance(value, bool):
            raise TableError(f"{what} has {name} = {value!r}, a {type(value).__name__}.")


def folders() -> list[Path]:
    """Where tables are looked for, least important first."""
    return [Path(__file__).parents[2] / "tables", current().cache_dir / "tables"]


def is_folder(path: Path) -> bool:
    """Whether a table at `path` is, or is to be, a folder with one file an op."""
    return path.is_dir() or (path.suffix == "" and not path.exists())


def file_of(path: Path, op: str) -> Path:
    """The file in which the table at `path` keeps rows of `op`."""
    return path / f"{op}.json" if is_folder(path) else path


def tables() -> list[Path]:
    """Every table in `folders()`, a file or a folder of files, least important first."""
    paths: list[Path] = []
    for folder in folders():
        paths += sorted(folder.glob("*.json"))
        paths += sorted({path.parent for path in folder.glob("*/*.json")})
    return paths


@cache
def _whole(settings: Settings) -> dict[Path, tuple[dict[str, Any], list[Row]]]:
    """Tables that are one file for all ops, read once."""
    return {path: contents for path in tables() if path.is_file() and (contents := _readable(path)) is not None}


def _readable(path: Path) -> tuple[dict[str, Any], list[Row]] | None:
    """(header, rows); None, with one log line, for a file that must not be used."""
    try:
        return read(path)
    except TableError as error:
        log_once(("table-refused", path), f"this tuning table is not used: {error}")
        return None


def _tables_of(op: str) -> list[tuple[Path, dict[str, Any], list[Row]]]:
    """(table, header, rows of `op`) of every table that has some, least important first; other ops' files stay
    unread.
    """
    files = []
    for path in tables():
        if path.is_file():
            contents = _whole(current()).get(path)
        else:
            file = file_of(path, op)
            contents = _readable(file) if file.exists() else None
        if contents is not None:
            files.append((path, *contents))
    named = current().tuning_table
    if named is not None:
        if not named.exists():
            raise TableError(f"TILEWRIGHT_TUNING_TABLE={named}: no such file or folder.")
        file = file_of(named, op)
        if file.exists():
            files.append((named, *read(file)))
    for each in extra.in_force():
        file = file_of(each, op)
        if file.exists() and (contents := _readable(file)) is not None:
            files.append((each, *contents))
    return [(path, header, [row for row in rows if row.op == op]) for path, header, rows in files]


@cache
def _rows_for(op: str, device: DeviceInfo, settings: Settings, held: tuple[Path, ...]) -> dict[tuple[str, ...], Row]:
    """Rows of `op` in all tables measured on this architecture; the GPU nearest in SM count wins among equals."""
    usable = []
    for rank, (path, header, rows) in enumerate(_tables_of(op)):
        if header["arch"] == device.arch:
            usable.append(
                (header["gpu"] == device.name, -abs(header["sm_count"] - device.sm_count), rank, header["gpu"], rows)
            )
            continue
        measured, device_text = f"{header['gpu']} ({header['arch']})", f"{device.name} ({device.arch})"
        log_once(
            ("table-elsewhere", path, device),
            f"tuning table {path} was measured on {measured} and is not used on {device_text}",
            logging.WARNING if path == current().tuning_table else logging.INFO,
        )
    merged: dict[tuple[str, ...], Row] = {}
    for same, _, _, gpu, rows in sorted(usable, key=lambda t: t[:3]):
        if not same and rows:
            log_once(("table", gpu), f"no tuning table for {device.name}; using the one of {gpu}", logging.INFO)
        merged.update({r.key: r for r in rows})
    return merged


def lookup(op: str, direction: str, bucket: str, dtype: str, numerics: str, device: DeviceInfo) -> Row | None:
    """The row that was measured for exactly this key on this architecture, or None."""
    return _rows_for(op, device, current(), extra.in_force()).get((op, direction, bucket, dtype, numerics))


def forget() -> None:
    """Read the tables again on next use; plans and tapes made with the old ones are made again."""
    _rows_for.cache_clear()
    _whole.cache_clear()
    GENERATION[0] += 1
