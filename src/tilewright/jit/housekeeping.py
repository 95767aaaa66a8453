"""Keeps the kernel cache small and tidy: the size bound, what dead processes left, and removal by hand."""

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.jit import entry as descriptions
from tilewright.jit.entry import CorruptError
from tilewright.jit.store import Store
from tilewright.log import log_once

# Removing some more than needed spares the next builds another count of the whole folder
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
    """Every readable entry, in order of name."""
    for folder in store.folders():
        with suppress(CorruptError, OSError):  # incomplete, or removed while we look
            described = descriptions.read(folder)
            fields = {f: described[f] for f in ("name", "kind", "arch", "compiler", "request", "created", "info")}
            size, used = _size_and_use(folder)
            yield Entry(folder=folder, size=size, used=used, **fields)


def shrink(store: Store, limit: int, keep: Collection[str]) -> int:
    """Remove the least recently used entries while all together exceed `limit` bytes; returns what is left in bytes.

    The folders named in `keep` stay, and so does what another process builds at the moment.
    """
    known = {}
    for folder in store.folders():
        with suppress(OSError):  # removed while we look
            known[folder] = _size_and_use(folder)
    total = sum(size for size, _ in known.values())
    if total <= limit:
        return total
    # A time well ahead of now comes from a wrong clock and says nothing: such entries go first, not never.  The entries
    # just written tell the file system's own time.
    now = max(time.time(), *(used for folder, (_, used) in known.items() if folder.name in keep), 0.0)
    for folder, (size, _) in sorted(known.items(), key=lambda item: _order(item[1][1], now)):
        if folder.name not in keep and _remove(store, folder.name):
            total -= size
        if total <= limit * _SHRINK_TO:
            break
    return total


def clear(store: Store, kind: str | None = None, older_than: float | None = None) -> int:
    """Remove entries; returns how many.  kind: only of this kind; older_than: only unused for so many seconds.

    Without either, broken entries go too.
    """
    if kind is None and older_than is None:
        chosen = store.folders()
        sweep(store)
    else:
        oldest = time.time() - (older_than or 0.0)
        chosen = [
            e.folder for e in entries(store) if kind in (None, e.kind) and (older_than is None or e.used <= oldest)
        ]
    return sum(_remove(store, folder.name) for folder in chosen)


def sweep(store: Store) -> None:
    """Remove half-written entries of dead processes: those whose lock nobody holds."""
    with suppress(OSError):  # nothing there, or no locks to tell who is alive
        for folder in (store.root / ".tmp").iterdir():
            lock = store.lock(folder.name.partition(".")[0])
            if lock.take():
                shutil.rmtree(folder, ignore_errors=True)
                lock.give()


def _remove(store: Store, folder: str) -> bool:
    """Remove one entry and its lock unless somebody is at work on it."""
    try:
        lock = store.lock(folder)
        if not lock.take():
            return False
        try:
            store.drop(folder)
        finally:
            lock.give(remove=True)
    except OSError as error:  # somebody else's, in a shared folder, or the disk is read-only
        log_once(("kernel cache", "remove", store.root), f"kernel cache: {folder} cannot be removed: {error}")
        return False
    return True


def _order(used: float, now: float) -> float:
    return used if used <= now + _AHEAD_SECONDS else 0.0


def _size_and_use(folder: Path) -> tuple[int, float]:
    """Bytes of an entry, and when it was last used: 0.0 for one without `entry.json`, which nobody can use."""
    size, used = 0, 0.0
    with os.scandir(folder) as files:
        for file in files:
            stat = file.stat()
            size += stat.st_size
            if file.name == descriptions.FILE:
                used = stat.st_mtime
    return size, used
