"""Merge measured rows into a table file: the one writer, for `bench` and `tuning`.

The file is replaced in one step under a lock of the machine, so that a reader sees the old table or the new one, and
two writers lose nothing of each other.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.dispatch.tables import columns, table
from tilewright.dispatch.tables.locks import cache_lock
from tilewright.errors import TableError
from tilewright.log import logger


def update(path: Path, header: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Put `rows` into the table at `path`, in place of those with the same key; plans of this process are renewed.
    A table that is a folder (`table.is_folder`) has one file an op.

    header: "gpu", "arch", "sm_count", "versions" and "date" of the measurement.
    Rows that are there already stay if the file is of the same GPU, each with the day and the versions it was measured
    with (`tables.staleness`).
    Raises TableError for a file that is no table: it is not overwritten.
    """
    files: dict[Path, list[Mapping[str, Any]]] = {}
    for row in rows:
        files.setdefault(table.file_of(path, row["op"]), []).append(row)
    if not files and not table.is_folder(path):
        files[path] = []
    for file, new in files.items():
        _merge(file, header, new)
    table.forget()
    return path


def _merge(path: Path, header: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    with _locked(path):
        merged = {tuple(row[name] for name in table.KEY): dict(row) for row in _kept(path, header)}
        for row in rows:
            merged[tuple(row[name] for name in table.KEY)] = dict(row)
        _replace(path, _text({"schema": table.SCHEMA, **header}, [merged[key] for key in sorted(merged)]))


def _kept(path: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    old, _ = table.read(path)
    if old["gpu"] != header["gpu"]:
        text = "%s: its %d rows are of %s, not of %s, and are dropped"
        logger.warning(text, path, len(old["rows"]), old["gpu"], header["gpu"])
        return []
    # A row keeps its day and its versions, which are no longer those of the file
    return [{"date": old["date"], "versions": old["versions"], **row} for row in old["rows"]]


def _text(header: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """The file, with each row's date and versions where they are others than the file's."""
    for row in rows:
        for name in ("date", "versions"):
            if row.get(name) == header[name]:
                del row[name]
    return columns.text(header, rows, table.COLUMNS)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise TableError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time.  The lock lies in the cache folder: a table's own folder may be a checkout."""
    name = f"table-{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]}"
    try:
        lock = cache_lock(name)
    except OSError as error:
        raise TableError(f"{path} cannot be locked: {error.filename}: {error.strerror}.") from None
    with lock:
        yield
