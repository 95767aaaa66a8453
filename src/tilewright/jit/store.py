"""The kernel cache on disk: one folder per entry, complete or absent.

    kernels/<name>-<request>-<compiler>/   kernel.cu, kernel.cubin, entry.json, extra files
    kernels/.locks/<entry>.lock            held while a process builds or removes the entry
    kernels/.tmp/<entry>.<unique>/         an entry that is being written or removed

An entry is written under `.tmp`, then renamed: a reader sees all of it or nothing.  A process that is killed leaves at
most a folder in `.tmp`, which may be removed once its lock is free.  The modification time of `entry.json` is the time
of its last use; only the order of eviction depends on it.
"""

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from errno import EPERM
from pathlib import Path

from tilewright.errors import CorruptError, UntrustedError
from tilewright.jit import entry as entries
from tilewright.jit import trust
from tilewright.jit.artifact import Artifact, BuildKey
from tilewright.jit.lock import KeyLock
from tilewright.log import log_once, log_once_a_tree


class Store:
    """The entries in one folder.  Writing methods raise OSError; for reading ones an OSError is a miss.

    A folder that other users own or may write (`trust`) is not used: reads miss and writes raise.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, key: BuildKey) -> Artifact | None:
        """The entry of exactly this key; None if it is absent.  Raises CorruptError."""
        folder = self.root / key.folder
        if self._refused():
            return None
        try:
            return _load(key, folder)
        except CorruptError:
            return _load(key, folder)  # it may have been replaced between two reads: read again

    def load_any(self, key: BuildKey) -> Artifact | None:
        """The newest valid entry of this request, of any compiler; None if there is none."""
        candidates: list[tuple[float, Artifact]] = []
        if self._refused():
            return None
        for folder in self.folders(key.family):
            with suppress(OSError):  # removed meanwhile
                try:
                    artifact = _load(key, folder)
                    if artifact is not None:
                        candidates.append((entries.read(folder)["created"], artifact))
                except CorruptError as error:
                    log_once(("kernel cache", folder), f"kernel cache: {folder} is passed over: {error}")
        return max(candidates, key=lambda pair: pair[0])[1] if candidates else None

    def folders(self, prefix: str = "") -> list[Path]:
        """The folders of all entries, valid or not, sorted by name."""
        try:
            paths = sorted(self.root.iterdir())
        except OSError:
            return []  # no folder, no entries
        return [path for path in paths if path.name.startswith(prefix) and entries.FOLDER.fullmatch(path.name)]

    def lock(self, folder: str) -> KeyLock:
        """The lock of one entry, not yet acquired.  Raises OSError if the folder cannot hold locks."""
        self._make_root()
        locks = self.root / ".locks"
        locks.mkdir(mode=trust.FOLDER_MODE, exist_ok=True)
        return KeyLock(locks / f"{folder}.lock")

    def put(self, folder: str, contents: Mapping[str, bytes], *, replace: bool = False) -> bool:
        """Write the entry `folder` with these files.  The caller holds the entry's lock.

        False if the entry exists and stays; without `replace` that only happens on a file system without locks.
        """
        partial = self._partial(folder)
        try:
            self._make_root()
            partial.parent.mkdir(mode=trust.FOLDER_MODE, exist_ok=True)
            partial.mkdir(mode=trust.FOLDER_MODE)
            for name, data in contents.items():
                _write(partial / name, data)
            if replace:
                self.drop(folder)
            try:
                partial.rename(self.root / folder)
            except OSError:
                if not (self.root / folder).is_dir():
                    raise
                return False
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # renamed away after a success
        return True

    def drop(self, folder: str) -> None:
        """Remove an entry, atomically for readers.  The caller holds the entry's lock."""
        removed = self._partial(folder)
        removed.parent.mkdir(mode=trust.FOLDER_MODE, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process removed it first
            (self.root / folder).rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _make_root(self) -> None:
        """Create the folder.  Raises PermissionError if it is not trusted."""
        self.root.mkdir(mode=trust.FOLDER_MODE, parents=True, exist_ok=True)
        if self._refused():
            raise PermissionError(EPERM, f"it is not used: {trust.why_not_folder(self.root)}")

    def _refused(self) -> bool:
        reason = trust.why_not_folder(self.root)
        if reason is not None:
            log_once_a_tree(
                f"kernel cache {self.root}",
                f"kernel cache: {self.root} is not used: {reason}, and could run code as you. Compiled kernels stay in "
                f"memory. If all in it is yours: chmod -R go-w {self.root}. Or point TILEWRIGHT_CACHE_DIR to a folder "
                "of your own.",
            )
        return reason is not None

    def _partial(self, folder: str) -> Path:
        return self.root / ".tmp" / f"{folder}.{uuid.uuid4().hex[:12]}"


def _load(key: BuildKey, folder: Path) -> Artifact | None:
    path = folder / f"kernel.{key.suffix}"
    try:
        with trust.opened(folder) as opened:
            entry = entries.parse(trust.read(opened, entries.FILE))
            binary = trust.read(opened, path.name)
    except UntrustedError as error:
        raise CorruptError(str(error)) from error
    except FileNotFoundError as error:
        if folder.is_dir():
            raise CorruptError(f"{Path(error.filename).name} is missing") from error
        return None
    except OSError:
        return None
    if entry["request"] != key.request:
        raise CorruptError("it answers another request")
    if entry["files"].get(path.name) != entries.checksum(binary):
        raise CorruptError(f"{path.name} differs from its checksum")
    with suppress(OSError):  # a read-only disk
        os.utime(folder / entries.FILE)
    return Artifact(key, binary, entry["info"], path)


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, trust.FILE_MODE), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # so that a renamed folder has no empty files after a power failure
