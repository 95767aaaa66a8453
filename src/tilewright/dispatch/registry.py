"""Who implements what.  A backend is a file beside the op (`triton.py`), found by name and imported when first
considered.

`@register_impl("rms_norm", backend="triton")` may be called from any package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from threading import RLock, local
from typing import Any

from tilewright.dispatch.backends import BACKENDS, importable, missing, module_exists
from tilewright.errors import InputError
from tilewright.generation import GENERATION

__all__ = ["GENERATION", "Implementation", "implementations", "register_impl", "unregister_impl"]


@dataclass(frozen=True)
class Implementation:
    """One backend of one raw op.

    launch      (outputs, *raw_args, config=...) -> None: writes every element of `outputs`, allocated by the caller.
    configure   (bucket, dtype) -> config: pure; a tuning table's row replaces its result.
    candidates  (bucket, dtype) -> configs: the search space, what the tuner times beside `configure`'s result.
    configs     every config that `configure` can return, so that each can be compiled without a GPU.
    config_type builds a config from a table row's dict.
    supports    (*raw_args) -> None or the reason it cannot run, in words; may look only at what the bucket and dtypes
    tell.
    """

    op: str
    direction: str
    backend: str
    launch: Callable[..., None]
    configure: Callable[[tuple[int, ...], Any], Any] | None = None
    config_type: Callable[..., Any] | None = None
    supports: Callable[..., str | None] | None = None
    deterministic: bool = True
    batch_invariant: bool = True
    configs: tuple[Any, ...] = ()
    candidates: Callable[[tuple[int, ...], Any], tuple[Any, ...]] | None = None

    def space(self, bucket: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
        """Every config worth timing, that of `configure` first; (None,) where there is nothing to choose."""
        default = self.configure(bucket, dtype) if self.configure else None
        found = [default]
        for config in self.candidates(bucket, dtype) if self.candidates else ():
            if config not in found:
                found.append(config)
        return tuple(found)


_implementations: dict[tuple[str, str], dict[str, list[Implementation]]] = {}
"""By op, direction and backend, all that were registered; the last one runs, the others wait for it to be taken out."""
_files = RLock()  # a file registers its first implementation before its last line has run
_reading = local()  # `.depth`: this thread imports a backend's file


def register_impl(
    op: str,
    *,
    backend: str,
    direction: str = "fwd",
    configure: Callable[..., Any] | None = None,
    config_type: Callable[..., Any] | None = None,
    configs: tuple[Any, ...] = (),
    candidates: Callable[[tuple[int, ...], Any], tuple[Any, ...]] | None = None,
    supports: Callable[..., str | None] | None = None,
    deterministic: bool = True,
    batch_invariant: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated `launch` as `backend` of `op` in `direction` ("fwd" or "bwd").  See `Implementation`.

    It takes the place of an implementation of that name until `unregister_impl`; the one that a backend's file brings
    never takes the place of another.
    """
    if direction not in ("fwd", "bwd"):
        raise InputError(f"register_impl({op!r}): direction {direction!r}; allowed are 'fwd' and 'bwd'.")

    def register(launch: Callable[..., None]) -> Callable[..., None]:
        GENERATION[0] += 1
        made = Implementation(
            op, direction, backend, launch, configure, config_type, supports, deterministic, batch_invariant, configs,
            candidates,
        )  # fmt: skip
        stack = _implementations.setdefault((op, direction), {}).setdefault(backend, [])
        stack.insert(0 if getattr(_reading, "depth", 0) else len(stack), made)
        return launch

    return register


def unregister_impl(op: str, *, backend: str, direction: str = "fwd") -> None:
    """Take out the implementation registered last; the one whose place it took is there again.

    Raises InputError where there is none.
    """
    known = _implementations.get((op, direction), {})
    if backend not in known:
        raise InputError(
            f"unregister_impl({op!r}): no {direction} {backend!r}; registered: {', '.join(known) or 'none'}."
        )
    GENERATION[0] += 1
    known[backend].pop()
    if not known[backend]:
        del known[backend]


def implementations(op: str, direction: str, package: str, device_type: str | None = None) -> dict[str, Implementation]:
    """Every implementation of a raw op: those registered, and those in files named after a backend in `package`.

    With `device_type` the files of backends that cannot run on such a device stay unread.
    """
    with _files:
        for backend in BACKENDS:
            module = f"{package}.{backend}"
            if (
                backend not in _implementations.get((op, direction), {})
                and _worth_reading(backend, device_type)
                and module_exists(module)
            ):
                _read(module)
        return {backend: stack[-1] for backend, stack in _implementations.get((op, direction), {}).items()}


def _read(module: str) -> None:
    """Import a backend's file, and those that it imports: what they register lies beneath what is there already."""
    _reading.depth = getattr(_reading, "depth", 0) + 1
    try:
        import_module(module)
    finally:
        _reading.depth -= 1


def _worth_reading(backend: str, device_type: str | None) -> bool:
    return importable(backend) if device_type is None else missing(backend, device_type) is None
