"""Measured tables: which backend and configuration was fastest, on which GPU.  This module reads; `bench` and `tuning`
write.

A table is JSON: `{"schema": 1, "gpu", "arch", "sm_count", "versions", "date", "rows": [...]}`, one row
`{"op", "direction", "bucket", "dtype", "numerics", "backend", "config", "us", "noise", "torch_us"}`.
Tables are read from the package, then the user's cache folder, then `TILEWRIGHT_TUNING_TABLE`; later ones win.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.errors import TableError
from tilewright.hardware import DeviceInfo
from tilewright.log import log_once
from tilewright.settings import current

SCHEMA = 1
_ROW_FIELDS = {"op", "direction", "bucket", "dtype", "numerics", "backend", "config", "us", "noise", "torch_us"}


@dataclass(frozen=True)
class Row:
    """One measured choice.  Times are microseconds of device time; `noise` is a fraction of `us`."""

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


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """(header, rows) of one table file.  Raises TableError for another schema or a malformed row."""
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise TableError(f"{path}: not JSON ({error}).") from None
    if not isinstance(data, dict):
        raise TableError(f"{path}: holds a {type(data).__name__}, not a table.")
    if data.get("schema") != SCHEMA:
        raise TableError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}. Measure it again.")
    rows = []
    for i, row in enumerate(data.get("rows", [])):
        if set(row) != _ROW_FIELDS:
            raise TableError(f"{path}: row {i} has fields {sorted(row)}, expected {sorted(_ROW_FIELDS)}.")
        rows.append(Row(**row, gpu=data["gpu"], date=data["date"], source=path.name))
    return data, rows


def folders() -> list[Path]:
    """Where tables are looked for, least important first."""
    return [Path(__file__).parent.parent / "tables", current().cache_dir / "tables"]


def _paths() -> list[Path]:
    found = [path for folder in folders() for path in sorted(folder.glob("*.json"))]
    extra = current().tuning_table
    if extra is not None:
        if not extra.is_file():
            raise TableError(f"TILEWRIGHT_TUNING_TABLE={extra}: no such file.")
        found.append(extra)
    return found


@cache
def _rows_for(device: DeviceInfo) -> dict[tuple[str, ...], Row]:
    """Rows of every table measured on this architecture; the GPU nearest in SM count wins among equals."""
    tables = []
    for rank, path in enumerate(_paths()):
        header, rows = read(path)
        if header["arch"] == device.arch:
            tables.append(
                (header["gpu"] == device.name, -abs(header["sm_count"] - device.sm_count), rank, header["gpu"], rows)
            )
    merged: dict[tuple[str, ...], Row] = {}
    for same, _, _, gpu, rows in sorted(tables, key=lambda t: t[:3]):
        if not same and rows:
            log_once(("table", gpu), f"no tuning table for {device.name}; using the one of {gpu}", logging.INFO)
        merged.update({(r.op, r.direction, r.bucket, r.dtype, r.numerics): r for r in rows})
    return merged


def lookup(op: str, direction: str, bucket: str, dtype: str, numerics: str, device: DeviceInfo) -> Row | None:
    """The row that was measured for exactly this key on this architecture, or None."""
    return _rows_for(device).get((op, direction, bucket, dtype, numerics))


def forget() -> None:
    """Read the tables again on next use."""
    _rows_for.cache_clear()
