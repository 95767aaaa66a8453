"""`ct`: the cuTile language if cuda.tile is installed, else a stand-in with which kernel files can be imported.

    from tilewright.jit.cutile_language import ct

A file of cuTile kernels must be importable without cuda.tile, because a bundle may hold their binaries.  At import such
a file uses `ct` only to annotate constants; the rest happens when a kernel is compiled.
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from tilewright.errors import BackendError

__all__ = ["INSTALL", "ct", "version"]

INSTALL = "pip install 'tilewright[cutile]'"


class _Constant:
    """Stand-in for `ct.Constant`, the annotation of a compile-time parameter: `ROWS: ct.Constant[int]`."""

    def __getitem__(self, kind: type) -> type:
        return kind


class _Absent:
    """Stand-in for cuda.tile: annotations work, everything else raises and says what to install."""

    Constant = _Constant()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BackendError(f"ct.{name} needs cuda.tile, which is not installed: {INSTALL}.")


def version() -> str | None:
    """The version of cuda.tile, "1.7.0"; None if it is not installed."""
    try:
        return metadata.version("cuda-tile") if find_spec("cuda.tile") is not None else None
    except (ModuleNotFoundError, metadata.PackageNotFoundError):  # ModuleNotFoundError: there is no package `cuda`
        return None


ct: Any = _Absent() if version() is None else import_module("cuda.tile")
