"""One tuner of an op on a kind of device at a time: a lock in the cache folder, which machines may share."""

from collections.abc import Iterator
from contextlib import contextmanager

from filelock import Timeout

from tilewright.bench.tables import slug
from tilewright.dispatch.tables.locks import cache_lock
from tilewright.errors import InputError


@contextmanager
def exclusive(name: str) -> Iterator[bool]:
    """Hold the lock called `name` on all machines with this cache folder; yields True if we had to wait for it."""
    try:
        lock = cache_lock(f"tune-{slug(name)}")
    except OSError as error:
        text = f"tune: {error.filename} cannot be made: {error.strerror}. Set TILEWRIGHT_CACHE_DIR."
        raise InputError(text) from None
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
