"""The requested backend and numerics, resolved into plain strings that travel as op arguments.

A backend string is "auto", a preference ("triton": a miss falls back with one log line) or strict ("triton!": a miss
raises). Numerics is "default", "deterministic" (bitwise repeatable) or "batch_invariant" (a row's bits do not depend
on its batch).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tilewright.dispatch.backends import check_name
from tilewright.errors import BackendError, InputError
from tilewright.settings import current

NUMERICS = ("default", "deterministic", "batch_invariant")

_process: str | None = None
# (backend, numerics) in one variable: it is read on every call
_context: ContextVar[tuple[str | None, str]] = ContextVar("tilewright_preference", default=(None, "default"))


def set_backend(backend: str | None) -> None:
    """Prefer `backend` in this process; None returns to `TILEWRIGHT_BACKEND` or "auto"."""
    global _process
    _process = None if backend is None else check_name(backend)


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Prefer `backend` inside the block, in this thread or task only."""
    token = _context.set((check_name(backend), _context.get()[1]))
    try:
        yield
    finally:
        _context.reset(token)


def get_current_backend() -> str:
    """The preference in force here: `use_backend`, else `set_backend`, else `TILEWRIGHT_BACKEND`, else "auto"."""
    preferred = _context.get()[0] or _process or current().backend
    try:
        return "auto" if preferred is None else check_name(preferred)
    except BackendError as error:  # the only one that was not checked when it was set
        raise BackendError(f"TILEWRIGHT_BACKEND={preferred}: {error}") from None


@contextmanager
def numerics(mode: str) -> Iterator[None]:
    """Choose implementations by what they promise: "deterministic" or "batch_invariant"; "default" lifts it again.

    "batch_invariant" is a promise of forward calls: the order in which a gradient of attention is added up depends on
    the whole batch.
    Where torch is chosen, "deterministic" also keeps its reference from vendor kernels that add in any order: the
    backward of attention in cuDNN and FLASH.
    """
    if mode not in NUMERICS:
        raise InputError(f"numerics({mode!r}): allowed are {', '.join(NUMERICS)}.")
    token = _context.set((_context.get()[0], mode))
    try:
        yield
    finally:
        _context.reset(token)


def current_numerics() -> str:
    """The mode in force here; of the call, inside a reference that dispatch runs."""
    return _context.get()[1]


def resolve(backend: str | None) -> tuple[str, str]:
    """(backend, numerics) as op arguments.  `torch.compile` reads them once, when it traces the call."""
    preferred, mode = _context.get()
    if backend is not None:
        return (backend if check_name(backend) == "auto" else backend + "!"), mode
    return preferred or get_current_backend(), mode


# What torch.compiler.assume_constant_result sets; calling it would import Dynamo, a second, with every `import`
resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]
current_numerics._dynamo_marked_constant = True  # type: ignore[attr-defined]
