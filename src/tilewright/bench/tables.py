"""Write the measurements of a run into a tuning table, the file that `auto` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.bench.schema import Results
from tilewright.dispatch.tables import table
from tilewright.dispatch.tables.staleness import versions
from tilewright.dispatch.tables.update import update
from tilewright.errors import InputError
from tilewright.settings import current


def write_table(results: Results, path: Path | None = None) -> Path:
    """Merge the fastest implementation of every case into the table at `path`, by default the user's of this device.

    Where two cases share a bucket, the one measured first is kept.  For rows that this run did not measure
    see `dispatch.tables.update`.  Raises InputError for results without choices (loaded from JSON) or with failures.
    Returns the path.
    """
    if not results.ok:
        failed = "; ".join(f"{n.op} {n.case} {n.name}: {n.reason}" for n in results.failures[:3])
        raise InputError(
            f"write_table: the run has {len(results.failures)} failures and is not to be trusted: {failed}"
        )
    if not results.choices:
        raise InputError("write_table: no measured choices; a table is written from a run, not from a result file")
    measured: dict[tuple[str, ...], dict[str, Any]] = {}
    for item in results.choices:
        row = {**asdict(item), "numerics": "default"}
        measured.setdefault(tuple(row[name] for name in table.KEY), row)
    machine = results.machine
    return update(path or users_table(machine["device"]), header(machine), measured.values())


def header(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a table measured on `machine`, a dict of `bench.machine.Machine`."""
    return {
        "gpu": machine["device"],
        "arch": machine["arch"],
        "sm_count": machine["sm_count"],
        "versions": dict(versions("cpu" if machine["arch"] == "cpu" else "cuda")),
        "date": machine["date"][:10],
    }


def users_table(device: str) -> Path:
    """The user's own table for a device of this name: a folder with one file an op."""
    return current().cache_dir / "tables" / slug(device)


def slug(device: str) -> str:
    """The name of a device as a file's or a folder's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
