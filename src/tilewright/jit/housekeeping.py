"""Maintenance of the kernel cache: its size bound, files left by dead processes, and removal on request."""

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import CorruptError
from tilewright.jit import entry as descriptions
from tilewright.jit.store import Store
from tilewright.log import log_once

# Remove more than needed, so that the next builds need not count the whole folder again
_SHRINK_TO = 0.9
_AHEAD_SECONDS = 60.0


@dataclass(frozen=True)
class Entry:
    """One cached kernel."""

    folder: Path
    name: str
    kind: str
    arch: str
    compiler: str
    request: str
    created: float  # seconds since 1970, by the clock of the machine that built it
    used: float  # by the clock of the file system
    size: int  # bytes of all its files
    info: dict[str, Any]


def entries(store: Store) -> Iterator[Entry]:
    """All readable entries, sorted by name."""
    for folder in store.folders():
        with suppress(CorruptError, OSError):  # incomplete, or removed meanwhile
            description = descriptions.read(folder)
            fields = {f: description[f] for f in ("name", "kind", "arch", "compiler", "request", "created", "info")}
            size, used = _size_and_use(folder)
            yield Entry(folder=folder, size=size, used=used, **fields)


def shrink(store: Store, limit: int, keep: Collection[str]) -> int:
    """Remove the least recently used entries while the total exceeds `limit` bytes; returns the bytes left.

    The folders named in `keep` stay, and entries that another process is building.
    """
    entries_by_folder = {}
    for folder in store.folders():
        with suppress(OSError):  # removed meanwhile
            entries_by_folder[folder] = _size_and_use(folder)
    total = sum(size for size, _ in entries_by_folder.values())
    if total <= limit:
        return total
    # A time far in the future comes from a wrong clock: remove such entries first, or they would stay for ever.  The
    # entries just written show the file system's own time.
    now = max(time.time(), *(used for folder, (_, used) in entries_by_folder.items() if folder.name in keep), 0.0)
    for folder, (size, _) in sorted(entries_by_folder.items(), key=lambda item: _order(item[1][1], now)):
        if folder.name not in keep and _remove(store, folder.name):
            total -= size
        if total <= limit * _SHRINK_TO:
            break
    return total


def clear(store: Store, kind: str | None = None, older_than: float | None = None) -> int:
    """Remove entries; returns their number.  kind: only of this kind; older_than: only unused for so many seconds.

    Without either, corrupt entries are removed too.
    """
    if kind is None and older_than is None:
        folders = store.folders()
        sweep(store)
    else:
        oldest = time.time() - (older_than or 0.0)
        folders = [
            e.folder for e in entries(store) if kind in (None, e.kind) and (older_than is None or e.used <= oldest)
        ]
    return sum(_remove(store, folder.name) for folder in folders)


def sweep(store: Store) -> None:
    """Remove partial entries of dead processes: those whose lock is free."""
    with suppress(OSError):  # no folder, or no locks to tell which processes are alive
        for folder in (store.root / ".tmp").iterdir():
            lock = store.lock(folder.name.partition(".")[0])
            if lock.take():
                shutil.rmtree(folder, ignore_errors=True)
                lock.give()


def _remove(store: Store, folder: str) -> bool:
    """Remove one entry and its lock, unless another process holds the lock."""
    try:
        lock = store.lock(folder)
        if not lock.take():
            return False
        try:
            store.drop(folder)
        finally:
            lock.give(remove=True)
    except OSError as error:  # another user's entry in a shared folder, or a read-only disk
        log_once(("kernel cache", "remove", store.root), f"kernel cache: {folder} cannot be removed: {error}")
        return False
    return True


def _order(used: float, now: float) -> float:
    return used if used <= now + _AHEAD_SECONDS else 0.0


def _size_and_use(folder: Path) -> tuple[int, float]:
    """Bytes of an entry, and the time of its last use: 0.0 without `entry.json`, since it is unusable."""
    size, used = 0, 0.0
    with os.scandir(folder) as files:
        for file in files:
            stat = file.stat()
            size += stat.st_size
            if file.name == descriptions.FILE:
                used = stat.st_mtime
    return size, used
