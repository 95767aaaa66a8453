"""Locks in the cache folder, which machines may share: one writer of a table, one tuner of an op."""

from filelock import FileLock

from tilewright.settings import current


def cache_lock(name: str) -> FileLock:
    """The lock called `name`, not yet held.  Raises OSError with the folder as `filename` where that cannot be made."""
    folder = current().cache_dir / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None
    return FileLock(folder / f"{name}.lock")
