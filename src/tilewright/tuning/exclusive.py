"""One tuner of an op on a kind of device at a time: a lock in the cache folder, which machines may share."""

from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from tilewright.bench.tables import slug
from tilewright.errors import InputError
from tilewright.settings import current


@contextmanager
def exclusive(name: str) -> Iterator[bool]:
    """Hold the lock called `name` on all machines with this cache folder; yields True if we had to wait for it."""
    locks = current().cache_dir / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"tune: {locks} cannot be made: {error.strerror}. Set TILEWRIGHT_CACHE_DIR.") from None
    lock = FileLock(locks / f"tune-{slug(name)}.lock")
    try:
        lock.acquire(timeout=0)
        waited = False
    except Timeout:
        lock.acquire()
        waited = True
    try:
        yield waited
    finally:
        lock.release()
