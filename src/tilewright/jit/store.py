"""The kernel cache on disk: one folder an entry, whole or absent.

    kernels/<name>-<request>-<compiler>/   kernel.cu, kernel.cubin, entry.json, extra files
    kernels/.locks/<entry>.lock            held by whoever builds or removes the entry
    kernels/.tmp/<entry>.<unique>/         an entry being written or removed

An entry is written under `.tmp`, then renamed: a reader sees all of it or nothing, and a process killed at any point
leaves at most a folder in `.tmp`, which is nobody's once its lock is free.  The modification time of `entry.json` is
the time of its last use; only the order of eviction depends on it.
"""

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from errno import EPERM
from pathlib import Path

from tilewright.jit import entry as entries
from tilewright.jit import trust
from tilewright.jit.artifact import Artifact, BuildKey
from tilewright.jit.entry import CorruptError
from tilewright.jit.lock import KeyLock
from tilewright.log import log_once, log_once_a_tree


class Store:
    """The entries under one folder.  What writes raises OSError; what reads calls it a miss.

    A folder that others own or may write (`trust`) holds nothing, and takes nothing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, key: BuildKey) -> Artifact | None:
        """The entry of exactly this key.  Raises CorruptError."""
        folder = self.root / key.folder
        if self._refused():
            return None
        try:
            return _load(key, folder)
        except CorruptError:
            return _load(key, folder)  # perhaps it was replaced between two of our reads: then this look finds it whole

    def load_any(self, key: BuildKey) -> Artifact | None:
        """The newest whole entry of this request, whichever compiler made it."""
        found: list[tuple[float, Artifact]] = []
        if self._refused():
            return None
        for folder in self.folders(key.family):
            with suppress(OSError):  # removed meanwhile
                try:
                    artifact = _load(key, folder)
                    if artifact is not None:
                        found.append((entries.read(folder)["created"], artifact))
                except CorruptError as error:
                    log_once(("kernel cache", folder), f"kernel cache: {folder} is passed over: {error}")
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def folders(self, prefix: str = "") -> list[Path]:
        """The folders of all entries, whole or not, in order of name."""
        try:
            found = sorted(self.root.iterdir())
        except OSError:
            return []  # no folder, no entries
        return [path for path in found if path.name.startswith(prefix) and entries.FOLDER.fullmatch(path.name)]

    def lock(self, folder: str) -> KeyLock:
        """The lock of one entry, not yet taken.  Raises OSError where there can be none."""
        self._make_root()
        locks = self.root / ".locks"
        locks.mkdir(mode=trust.FOLDER_MODE, exist_ok=True)
        return KeyLock(locks / f"{folder}.lock")

    def put(self, folder: str, contents: Mapping[str, bytes], *, replace: bool = False) -> bool:
        """Make the entry `folder` of these files.  Call it with the entry's lock held.

        False where one exists and stays, which without `replace` only a file system without locks lets happen.
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
            shutil.rmtree(partial, ignore_errors=True)  # not there any more after a success
        return True

    def drop(self, folder: str) -> None:
        """Remove an entry, for every reader in one step.  Call it with the entry's lock held."""
        gone = self._partial(folder)
        gone.parent.mkdir(mode=trust.FOLDER_MODE, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # somebody was faster
            (self.root / folder).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _make_root(self) -> None:
        """Have the folder.  Raises PermissionError where it is not to be trusted."""
        self.root.mkdir(mode=trust.FOLDER_MODE, parents=True, exist_ok=True)
        if self._refused():
            raise PermissionError(EPERM, f"it is not used: {trust.refusal_of(self.root)}")

    def _refused(self) -> bool:
        reason = trust.refusal_of(self.root)
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
    except trust.UntrustedError as error:
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
    with suppress(OSError):  # a read-only disk keeps no times
        os.utime(folder / entries.FILE)
    return Artifact(key, binary, entry["info"], path)


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, trust.FILE_MODE), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # after a power cut, no renamed folder holds empty files
