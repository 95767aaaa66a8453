"""One builder a key: a lock of the operating system's, which vanishes with the process that held it."""

from contextlib import suppress
from pathlib import Path


class KeyLock:
    """The lock of one key, over all processes that share a cache folder."""

    def __init__(self, path: Path) -> None:
        from filelock import FileLock  # only who builds needs it

        self._path = path
        self._lock = FileLock(str(path))

    def take(self, wait: float = 0.0) -> bool:
        """Take the lock if nobody holds it for `wait` seconds.  Raises OSError where the folder cannot hold locks."""
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=wait)
        except Timeout:
            return False
        except NotImplementedError as error:  # a file system without locks
            raise OSError(str(error)) from error
        return True

    def give(self, *, remove: bool = False) -> None:
        """Let go; remove: also delete the file, for a key whose entry is gone.

        A process that waits on the deleted file may then build beside a newer one.  That costs time and nothing else,
        because publishing tolerates a loser.
        """
        if remove:
            with suppress(OSError):  # gone already, or not ours to delete
                self._path.unlink()
        self._lock.release()
