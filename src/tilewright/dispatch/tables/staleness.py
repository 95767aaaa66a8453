"""Say which measured rows are stale: measured with another driver, torch, compiler or version of this library.

Dispatch uses a stale row as any other: it is still the best that is known.  `explain` and `doctor` name it, and the
tuner measures it again.  Rows that come with the package are never called stale: they were measured elsewhere.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tilewright.dispatch.tables import table
from tilewright.errors import TableError
from tilewright.hardware import device_info
from tilewright.hardware.ceilings import driver_version
from tilewright.jit.compilers import get_compiler
from tilewright.log import log_once
from tilewright.settings import current
from tilewright.version import __version__

Changes = dict[str, tuple[str | None, str | None]]
"""What differs: name -> (the version it was measured with, the one of now)."""


@dataclass(frozen=True)
class UsersTable:
    """A table of the user's.   rows, stale: numbers of them.   changes: what differs in the stale ones."""

    path: Path
    rows: int
    stale: int
    changes: Changes


@cache
def versions(device_type: str) -> dict[str, str | None]:
    """Versions that a time on such a device may depend on: this library, torch, triton, the driver, the compilers."""
    compilers = ("host",) if device_type == "cpu" else ("nvrtc", "tileiras")
    installed = {name: get_compiler(name).version() for name in compilers}
    return {
        "tilewright": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "driver": driver_version(device_type),
        **{name: version for name, version in installed.items() if version is not None},
    }


def changes(row: table.Row, device_type: str) -> Changes:
    """What is another version now than when `row` was measured; empty for a fresh row and for a shipped one.

    A library that only one of the two names is not compared.
    """
    return {} if row.shipped else _compared(row.versions, versions(device_type))


def in_words(changed: Mapping[str, tuple[str | None, str | None]]) -> str:
    """ "driver 580.1 (now 590.2), torch 2.10 (now 2.11)"."""
    return ", ".join(f"{name} {was or 'none'} (now {now or 'none'})" for name, (was, now) in sorted(changed.items()))


def users_tables(devices: Iterable[str]) -> list[UsersTable]:
    """The user's own tables for these devices, and the one in `TILEWRIGHT_TUNING_TABLE`, with their stale rows."""
    types = {device_info(device).arch: torch.device(device).type for device in devices}
    package = table.folders()[0]
    named = current().tuning_table
    paths = [path for path in table.tables() if not path.is_relative_to(package)]
    states = (_state(path, types) for path in [*paths, *([] if named is None else [named])])
    return [state for state in states if state.rows]


def _state(path: Path, types: Mapping[str, str]) -> UsersTable:
    count, stale, union = 0, 0, Changes()
    for file in [path] if path.is_file() else sorted(path.glob("*.json")):
        try:
            header, rows = table.read(file)
        except TableError as error:
            log_once(("table-refused", file), f"this tuning table is not used: {error}")
            continue
        if header["arch"] not in types:
            continue
        count += len(rows)
        differences = [changed for row in rows if (changed := changes(row, types[header["arch"]]))]
        stale += len(differences)
        for changed in differences:
            union |= changed
    return UsersTable(path, count, stale, union)


def _compared(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> Changes:
    return {name: (before[name], now[name]) for name in before.keys() & now.keys() if before[name] != now[name]}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
