"""The cache of compiled kernels: memory, then disk, then the compiler.

`get(key, build)` returns the binary of a key.  All processes that share `TILEWRIGHT_CACHE_DIR` compile it once: the
builder holds the key's lock, the others read the entry that it publishes.  If the disk cannot be written, kernels stay
in memory, with one warning.  If no compiler is installed, an entry of the same request serves, whichever compiler made
it: so a bundle from another machine runs.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright import settings
from tilewright.errors import CorruptError, KernelMissingError
from tilewright.jit import housekeeping
from tilewright.jit.artifact import Artifact, BuildKey, Built
from tilewright.jit.entry import compose
from tilewright.jit.housekeeping import Entry
from tilewright.jit.lock import KeyLock
from tilewright.jit.store import Store
from tilewright.log import log_once_a_tree, logger

__all__ = [
    "Artifact",
    "BuildKey",
    "Built",
    "CacheInfo",
    "Entry",
    "clear",
    "entries",
    "find",
    "forget",
    "get",
    "info",
    "store",
]

_LOG_AFTER_SECONDS = 1.0  # a longer wait or compilation is logged
_LOCK_TIMEOUT_SECONDS = 600.0  # after that, compile although another process holds the lock
_COUNT_AFTER = 1 / 20  # of the size bound: bytes published before the folder is counted again

_INSTALL = {
    "cuda": "pip install 'tilewright[cuda]'",
    "cutile": "pip install 'tilewright[cutile]'",
    "triton": "pip install triton",
    "host": "install g++",
}


class _Process:
    """The state of this process for one cache folder."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.memory: dict[str, Artifact] = {}
        self.rebuilt: set[str] = set()
        self.locks: dict[str, threading.Lock] = {}
        self.published: int | None = None  # bytes since the folder was counted; None: never counted


@dataclass(frozen=True)
class CacheInfo:
    """The cache as a whole.  kinds: kind -> (entries, bytes)."""

    folder: Path
    writable: bool
    entries: int
    bytes: int
    limit_bytes: int
    in_memory: int
    kinds: dict[str, tuple[int, int]]


_settings: settings.Settings | None = None
_process: _Process | None = None
_opening = threading.Lock()  # threads that make the first call at once must share one _Process


def get(key: BuildKey, build: Callable[[], Built] | None) -> Artifact:
    """The binary of `key`: from memory, from disk, or else from `build()`, which is published on disk.

    With `build` None or `key.compiler` "" nothing is compiled: the newest entry of the same request serves.
    Raises KernelMissingError if there is none, and what `build` raises.
    """
    process = _state()
    artifact = process.memory.get(key.digest)
    if artifact is not None and not _must_rebuild(process, key):
        return artifact
    with process.locks.setdefault(key.digest, threading.Lock()):
        if build is None or not key.compiler:
            artifact = process.memory.get(key.digest) or _load(process, key) or process.store.load_any(key)
            if artifact is None:
                raise KernelMissingError(_missing(key, process.store.root))
        else:
            rebuild = _must_rebuild(process, key)
            artifact = None if rebuild else process.memory.get(key.digest) or _load(process, key)
            if artifact is None:
                artifact = _build_once(process, key, build, rebuild)
                process.rebuilt.add(key.digest)
        process.memory[key.digest] = artifact
    return artifact


def find(key: BuildKey) -> Artifact | None:
    """The binary of `key` if it is cached, else None; of any compiler if `key.compiler` is ""."""
    process = _state()
    artifact = process.memory.get(key.digest) or _load(process, key)
    if artifact is None and not key.compiler:
        artifact = process.store.load_any(key)
    if artifact is not None:
        process.memory[key.digest] = artifact
    return artifact


def entries() -> Iterator[Entry]:
    """All readable entries on disk, sorted by name."""
    return housekeeping.entries(_state().store)


def info() -> CacheInfo:
    """The cache's folder, size and contents."""
    process = _state()
    kinds: dict[str, tuple[int, int]] = {}
    for entry in entries():
        count, size = kinds.get(entry.kind, (0, 0))
        kinds[entry.kind] = count + 1, size + entry.size
    root = process.store.root
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return CacheInfo(
        folder=root,
        writable=existing.is_dir() and os.access(existing, os.W_OK),
        entries=sum(count for count, _ in kinds.values()),
        bytes=sum(size for _, size in kinds.values()),
        limit_bytes=_limit(),
        in_memory=len(process.memory),
        kinds=kinds,
    )


def clear(kind: str | None = None, older_than: float | None = None) -> int:
    """Remove entries from disk and forget all in memory; returns the number removed.

    kind: only of this kind; older_than: only those unused for so many seconds.  An entry that another process is
    building stays.
    """
    forget()
    return housekeeping.clear(_state().store, kind, older_than)


def forget() -> None:
    """Drop the entries in memory of this process; the disk stays."""
    global _process, _settings
    _process = _settings = None


def store() -> Store:
    """The entries on disk, for the current settings."""
    return _state().store


def _state() -> _Process:
    global _process, _settings
    now, process = settings.current(), _process  # read once: another thread may forget it
    if process is None or now is not _settings:
        with _opening:
            process, folder = _process, now.cache_dir / "kernels"
            if process is None or process.store.root != folder:
                process = _process = _Process(folder)
            _settings = now
    return process


def _limit() -> int:
    return settings.current().cache_limit_mb * 2**20


def _must_rebuild(process: _Process, key: BuildKey) -> bool:
    return settings.current().jit_rebuild and key.digest not in process.rebuilt


def _load(process: _Process, key: BuildKey) -> Artifact | None:
    """Load from disk.  A corrupt entry counts as absent; the process that holds the lock drops it."""
    try:
        return process.store.load(key)
    except CorruptError:
        return None


def _build_once(process: _Process, key: BuildKey, build: Callable[[], Built], rebuild: bool) -> Artifact:
    """Build under the key's lock, or load what another process published during the wait for it."""
    if process.published is None:
        housekeeping.sweep(
            process.store
        )  # once, before this process holds a lock: sweep removes work whose lock is free
    lock, artifact = _await_lock(process, key, rebuild)
    try:
        if artifact is None and not rebuild:
            artifact = _reload(process, key)
        return artifact or _build(process, key, build, rebuild)
    finally:
        if lock is not None:
            lock.give()


def _await_lock(process: _Process, key: BuildKey, rebuild: bool) -> tuple[KeyLock | None, Artifact | None]:
    """(acquired lock, None), or (None, what its holder published), or (None, None) after a timeout or without locks."""
    try:
        lock = process.store.lock(key.folder)
        start, pause, logged = time.monotonic(), 0.01, False
        while not lock.take():
            waited = time.monotonic() - start
            if waited > _LOG_AFTER_SECONDS and not logged:
                logged = True
                logger.warning("waiting for another process that compiles %s for %s", key.name, key.arch)
            if waited > _LOCK_TIMEOUT_SECONDS:
                logger.warning("still not there after %.0f s; compiling %s in this process too", waited, key.name)
                return None, None
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            artifact = None if rebuild else _load(process, key)
            if artifact is not None:
                return None, artifact
    except OSError as error:
        logger.debug("kernel cache: %s cannot be locked: %s", key.folder, error)
        return None, None  # publishing then fails too and warns, or works and tolerates a second builder
    return lock, None


def _reload(process: _Process, key: BuildKey) -> Artifact | None:
    try:
        return process.store.load(key)
    except CorruptError as reason:
        logger.warning("kernel cache: %s is dropped and built again: %s", process.store.root / key.folder, reason)
        try:
            process.store.drop(key.folder)
        except OSError as error:
            _disk_unusable(process, error)
    return None


def _build(process: _Process, key: BuildKey, build: Callable[[], Built], rebuild: bool) -> Artifact:
    start = time.monotonic()
    built = build()
    seconds = time.monotonic() - start
    if seconds > _LOG_AFTER_SECONDS:
        logger.info("compiled %s for %s in %.1f s", key.name, key.arch, seconds)
    path: Path | None = process.store.root / key.folder / f"kernel.{key.suffix}"
    contents = compose(key, built)
    try:
        if not process.store.put(key.folder, contents, replace=rebuild):
            return _load(process, key) or _artifact(key, built, None)
        _keep_size_bound(process, key.folder, sum(map(len, contents.values())))
    except OSError as error:
        _disk_unusable(process, error)
        path = None
    return _artifact(key, built, path)


def _artifact(key: BuildKey, built: Built, path: Path | None) -> Artifact:
    # Through JSON, so that the builder sees the same info as a reader: lists for tuples, strings for keys
    return Artifact(key, built.binary, json.loads(json.dumps(built.info)), path)


def _keep_size_bound(process: _Process, folder: str, size: int) -> None:
    """Shrink the cache to its size bound, after `size` bytes were published in `folder`."""
    if process.published is not None:
        process.published += size
    if process.published is None or process.published > _limit() * _COUNT_AFTER:
        housekeeping.shrink(process.store, _limit(), keep=(folder,))
        process.published = 0


def _disk_unusable(process: _Process, error: OSError) -> None:
    log_once_a_tree(
        f"kernel cache {process.store.root}",
        f"kernel cache: {process.store.root} cannot be written ({error.strerror or error}); compiled kernels stay in "
        "memory and every process compiles its own. Make room, or point TILEWRIGHT_CACHE_DIR to another folder.",
    )


def _missing(key: BuildKey, root: Path) -> str:
    return (
        f"{key.name} for {key.arch} is not in the kernel cache, and no {key.kind} compiler is here to make it. Either: "
        f"{_INSTALL.get(key.kind, 'install one')}. Or bring a bundle from a machine that has one: there `tilewright "
        f"warmup --arch {key.arch} --out kernels.zip`, here `tilewright cache import kernels.zip`. The cache: {root}."
    )


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()  # a thread that held one does not exist in the child
    if _process is not None:
        _process.locks = {}


os.register_at_fork(after_in_child=_after_fork)
