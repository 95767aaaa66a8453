"""The five backends: what each needs from the machine, told without importing any of them."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from tilewright.errors import BackendError

BACKENDS = ("cuda", "cutile", "triton", "cpu", "torch")
"""Names in the order `auto` prefers them where nothing is measured."""

CHOICES = ("auto", *BACKENDS)


@dataclass(frozen=True)
class _Needs:
    module: str | None
    devices: tuple[str, ...]
    install: str


_NEEDS = {
    "cuda": _Needs("cuda.core", ("cuda",), "pip install tilewright[cuda]"),
    "cutile": _Needs("cuda.tile", ("cuda",), "pip install tilewright[cutile]"),
    "triton": _Needs("triton", ("cuda",), "pip install triton"),
    "cpu": _Needs(None, ("cpu",), ""),
    "torch": _Needs(None, (), ""),
}


def interpreting() -> bool:
    """True where Triton kernels run in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


@cache
def module_exists(name: str) -> bool:
    """Can `name` be imported?  Answered without importing it (its parent packages are)."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is absent
        return False


def importable(backend: str) -> bool:
    """Are the libraries installed that a file of this backend imports?"""
    needs = _NEEDS.get(backend)
    return needs is None or needs.module is None or module_exists(needs.module)


def missing(backend: str, device_type: str) -> str | None:
    """Why `backend` cannot run on this kind of device here, in words; None when it can."""
    needs = _NEEDS.get(backend)
    if needs is None:  # registered by another package, which answers for itself in `supports`
        return None
    if needs.devices and device_type not in needs.devices:
        if backend == "triton" and device_type == "cpu" and interpreting():
            return None
        return f"runs on {', '.join(needs.devices)} tensors, got {device_type}"
    if needs.module and not module_exists(needs.module):
        return f"needs the module {needs.module} ({needs.install})"
    return None


def check_name(backend: str) -> str:
    """`backend` if it is a known choice; raises BackendError otherwise."""
    if backend not in CHOICES:
        raise BackendError(f"no backend named {backend!r}. Allowed: {', '.join(CHOICES)}.")
    return backend
