"""The one cache of compiled kernels: memory, then disk, then the compiler.

`get(key, build)` returns the binary of a key.  All processes that share `TILEWRIGHT_CACHE_DIR` compile it once: the
builder holds the key's lock, the others read what it published.  Where the disk cannot be written, kernels live in
memory, with one warning.  Where no compiler is installed, an entry of the same request will do, whichever compiler
made it: so a bundle made elsewhere runs.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright import settings
from tilewright.errors import KernelMissingError
from tilewright.jit import housekeeping
from tilewright.jit.artifact import Artifact, BuildKey, Built
from tilewright.jit.entry import CorruptError, compose
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

_SPEAK_SECONDS = 1.0  # nobody waits longer than this without a line
_PATIENCE_SECONDS = 600.0  # then a process builds beside one that seems to hang
_COUNT_AFTER = 1 / 20  # of the size bound: bytes published before the folder is counted again

_INSTALL = {
    "cuda": "pip install 'tilewright[cuda]'",
    "cutile": "pip install 'tilewright[cutile]'",
    "triton": "pip install triton",
    "host": "install g++",
}


class _Process:
    """What this process knows of one cache folder."""

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
_opening = threading.Lock()  # threads that are first at once share one memory, and its locks


def get(key: BuildKey, build: Callable[[], Built] | None) -> Artifact:
    """The binary of `key`: from memory, from disk, or else from `build()`, published for everybody.

    With `build` None or `key.compiler` "" nothing is compiled: an entry of the same request serves, the newest first.
    Raises KernelMissingError if there is none, and whatever `build` raises.
    """
    process = _here()
    found = process.memory.get(key.digest)
    if found is not None and not _must_rebuild(process, key):
        return found
    with process.locks.setdefault(key.digest, threading.Lock()):
        if build is None or not key.compiler:
            found = process.memory.get(key.digest) or _load(process, key) or process.store.load_any(key)
            if found is None:
                raise KernelMissingError(_missing(key, process.store.root))
        else:
            rebuild = _must_rebuild(process, key)
            found = None if rebuild else process.memory.get(key.digest) or _load(process, key)
            if found is None:
                found = _build_once(process, key, build, rebuild)
                process.rebuilt.add(key.digest)
        process.memory[key.digest] = found
    return found


def find(key: BuildKey) -> Artifact | None:
    """The binary of `key` if it need not be compiled; of any compiler where `key.compiler` is ""."""
    process = _here()
    found = process.memory.get(key.digest) or _load(process, key)
    if found is None and not key.compiler:
        found = process.store.load_any(key)
    if found is not None:
        process.memory[key.digest] = found
    return found


def entries() -> Iterator[Entry]:
    """Every readable entry on disk, in order of name."""
    return housekeeping.entries(_here().store)


def info() -> CacheInfo:
    """Where the cache is, how full, and of what."""
    process = _here()
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
    """Remove entries from disk and forget all in memory; returns how many went.

    kind: only of this kind; older_than: only those unused for so many seconds.  What another process builds stays.
    """
    forget()
    return housekeeping.clear(_here().store, kind, older_than)


def forget() -> None:
    """Drop what this process keeps in memory; the disk stays."""
    global _process, _settings
    _process = _settings = None


def store() -> Store:
    """The entries on disk under the settings in force."""
    return _here().store


def _here() -> _Process:
    global _process, _settings
    now, here = settings.current(), _process  # read once: another thread may forget it
    if here is None or now is not _settings:
        with _opening:
            here, folder = _process, now.cache_dir / "kernels"
            if here is None or here.store.root != folder:
                here = _process = _Process(folder)
            _settings = now
    return here


def _limit() -> int:
    return settings.current().cache_limit_mb * 2**20


def _must_rebuild(process: _Process, key: BuildKey) -> bool:
    return settings.current().jit_rebuild and key.digest not in process.rebuilt


def _load(process: _Process, key: BuildKey) -> Artifact | None:
    """From disk; a corrupt entry counts as absent, for whoever holds the lock to drop."""
    try:
        return process.store.load(key)
    except CorruptError:
        return None


def _build_once(process: _Process, key: BuildKey, build: Callable[[], Built], rebuild: bool) -> Artifact:
    """Build under the key's lock, or take what another process published while we waited for it."""
    if process.published is None:
        housekeeping.sweep(process.store)  # once, and before we hold a lock that marks our own work as alive
    lock, found = _await_lock(process, key, rebuild)
    try:
        if found is None and not rebuild:
            found = _look_again(process, key)
        return found or _build(process, key, build, rebuild)
    finally:
        if lock is not None:
            lock.give()


def _await_lock(process: _Process, key: BuildKey, rebuild: bool) -> tuple[KeyLock | None, Artifact | None]:
    """The lock taken; or (None, what its holder published); or (None, None) where there are no locks or no end."""
    try:
        lock = process.store.lock(key.folder)
        began, pause, spoke = time.monotonic(), 0.01, False
        while not lock.take():
            waited = time.monotonic() - began
            if waited > _SPEAK_SECONDS and not spoke:
                spoke = True
                logger.warning("waiting for another process that compiles %s for %s", key.name, key.arch)
            if waited > _PATIENCE_SECONDS:
                logger.warning("still not there after %.0f s; compiling %s in this process too", waited, key.name)
                return None, None
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            found = None if rebuild else _load(process, key)
            if found is not None:
                return None, found
    except OSError as error:
        logger.debug("kernel cache: %s cannot be locked: %s", key.folder, error)
        return None, None  # publishing fails as well and warns, or works and tolerates a second builder
    return lock, None


def _look_again(process: _Process, key: BuildKey) -> Artifact | None:
    try:
        return process.store.load(key)
    except CorruptError as reason:
        logger.warning("kernel cache: %s is dropped and built anew: %s", process.store.root / key.folder, reason)
        try:
            process.store.drop(key.folder)
        except OSError as error:
            _disk_unusable(process, error)
    return None


def _build(process: _Process, key: BuildKey, build: Callable[[], Built], rebuild: bool) -> Artifact:
    began = time.monotonic()
    built = build()
    seconds = time.monotonic() - began
    if seconds > _SPEAK_SECONDS:
        logger.info("compiled %s for %s in %.1f s", key.name, key.arch, seconds)
    path: Path | None = process.store.root / key.folder / f"kernel.{key.suffix}"
    contents = compose(key, built)
    try:
        if not process.store.put(key.folder, contents, replace=rebuild):
            return _load(process, key) or _of(key, built, None)
        _bound(process, key.folder, sum(map(len, contents.values())))
    except OSError as error:
        _disk_unusable(process, error)
        path = None
    return _of(key, built, path)


def _of(key: BuildKey, built: Built, path: Path | None) -> Artifact:
    # Through JSON, so that the process that builds sees what all others will see: lists for tuples, text for keys
    return Artifact(key, built.binary, json.loads(json.dumps(built.info)), path)


def _bound(process: _Process, folder: str, size: int) -> None:
    """Keep the size bound after `size` bytes were published."""
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
