"""The five backends: what each needs from the machine, told without importing any of them."""

import logging
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from tilewright.errors import BackendError, InputError
from tilewright.log import log_once

BACKENDS = ("cuda", "triton", "cutile", "cpu", "torch")
"""Names in the order `auto` prefers them where nothing is measured."""

CHOICES = ("auto", *BACKENDS)


@dataclass(frozen=True)
class _Needs:
    """modules: to import its files.  compiler, kind: who compiles its kernels, and what the cache calls them."""

    module: str | None
    devices: tuple[str, ...]
    install: str = ""
    compiler: str | None = None
    kind: str | None = None


_NEEDS = {
    "cuda": _Needs("cuda.core", ("cuda",), "pip install tilewright[cuda]"),
    "triton": _Needs("triton", ("cuda",), "pip install triton"),
    "cutile": _Needs("cuda.core", ("cuda",), "pip install tilewright[cuda,cutile]", "tileiras", "cutile"),
    "cpu": _Needs(None, ("cpu",), compiler="host", kind="host"),
    "torch": _Needs(None, ()),
}

_FOLDERS = ("triton", "cutile", "cpu")


def backend_of(kernel: str) -> str:
    """The backend of a kernel, by the folder it lies in: "cuda" of "sm90.dense", "triton" of "triton.dense".

    CUDA C++ lies in folders named after an architecture, other kernels in one named after their backend.  Raises
    InputError for a folder of another name.
    """
    target = kernel.partition(".")[0]
    if re.fullmatch(r"sm\d+", target):
        return "cuda"
    if target not in _FOLDERS:
        raise InputError(f"{kernel}: no kernels lie in {target}/. Allowed: sm<number>/, {'/, '.join(_FOLDERS)}/.")
    return target


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
    return _uncompilable(backend, needs)


def on_device(device_type: str) -> list[str]:
    """Backends with kernels of their own for this kind of device, here or not."""
    return [name for name, needs in _NEEDS.items() if device_type in needs.devices]


_compilable: set[str] = set()  # compilers found, or not needed because a bundle brought kernels


def _uncompilable(backend: str, needs: _Needs) -> str | None:
    """Why there are no kernels to run, in words: no compiler here, and none that a bundle brought."""
    if needs.compiler is None or needs.compiler in _compilable:
        return None
    from tilewright.jit import cache
    from tilewright.jit.compilers import get_compiler

    compiler = get_compiler(needs.compiler)
    if compiler.version() is None and not any(entry.kind == needs.kind for entry in cache.entries()):
        reason = f"has no compiler here: {compiler.install()}"
        log_once(("compiler", needs.compiler), f"the {backend} backend {reason}", logging.INFO)
        return reason
    _compilable.add(needs.compiler)
    return None


def check_name(backend: str) -> str:
    """`backend` if it is a known choice; raises BackendError otherwise."""
    if backend not in CHOICES:
        raise BackendError(f"no backend named {backend!r}. Allowed: {', '.join(CHOICES)}.")
    return backend
