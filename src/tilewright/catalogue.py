"""Which module declares which op: an index, from which an op is imported when it is first asked for.

`tilewright.ops` announces its ops here, by name.  `contracts()` and `torch.ops.tilewright` ask here, and so know every
op although no module of one was imported.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module

import torch
from torch.utils._python_dispatch import _disable_current_modes

_modules: dict[str, str] = {}


def announce(modules: Mapping[str, str]) -> None:
    """Make known that importing `modules[name]` declares op `name`."""
    _modules.update(modules)


def announced(name: str) -> bool:
    """Does a module declare op `name`?"""
    return name in _modules


def load(name: str) -> None:
    """Import the module that declares op `name`; every module where none does, so that an error can name all ops."""
    if name not in _modules:
        load_all()
        return
    with _no_modes():
        import_module(_modules[name])


def load_all() -> None:
    """Import every module that declares an op."""
    with _no_modes():
        for module in _modules.values():
            import_module(module)


@contextmanager
def _no_modes() -> Iterator[None]:
    """The first use of an op may lie under fake tensors, another default device or inference mode; small tensors that
    its module keeps must be real ones.
    """
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
