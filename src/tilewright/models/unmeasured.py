"""Send calls to our ops also where nothing was measured: the tuner looks for what is worth measuring.

`patch` leaves linear layers and attention with torch at sizes without a row, so a model that was never tuned would show
none of its products to the tuner.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_included: ContextVar[bool] = ContextVar("tilewright_unmeasured_sizes", default=False)


@contextmanager
def unmeasured_sizes() -> Iterator[None]:
    """Inside the block, patches replace linear layers and attention without a measurement, and their calls run so."""
    token = _included.set(True)
    try:
        yield
    finally:
        _included.reset(token)


def included() -> bool:
    """True inside `unmeasured_sizes`."""
    return _included.get()
