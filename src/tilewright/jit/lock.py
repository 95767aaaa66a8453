"""One builder per key: a lock of the operating system, which is released when its process dies."""

from contextlib import suppress
from pathlib import Path


class KeyLock:
    """The lock of one key among all processes that share a cache folder."""

    def __init__(self, path: Path) -> None:
        from filelock import FileLock  # only needed to build

        self._path = path
        self._lock = FileLock(str(path))

    def take(self, wait: float = 0.0) -> bool:
        """Acquire the lock in `wait` seconds, else return False.  Raises OSError if the folder cannot hold locks."""
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=wait)
        except Timeout:
            return False
        except NotImplementedError as error:  # a file system without locks
            raise OSError(str(error)) from error
        return True

    def give(self, *, remove: bool = False) -> None:
        """Release the lock.  remove: also delete the file, for a key whose entry was removed.

        A process that waits on the deleted file may then build at the same time as another.  That only costs time,
        because publishing tolerates a second builder.
        """
        if remove:
            with suppress(OSError):  # already deleted, or another user's
                self._path.unlink()
        self._lock.release()
