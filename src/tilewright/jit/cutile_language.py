"""`ct`: the cuTile language where cuda.tile is installed, and where it is not, a name under which kernels can be read.

    from tilewright.jit.cutile_language import ct

A file of cuTile kernels must be importable without cuda.tile, because a bundle brings their binaries ready made.  All
that such a file does with `ct` when it is imported is to annotate constants; the rest happens when one is compiled.
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from tilewright.errors import BackendError

__all__ = ["INSTALL", "ct", "version"]

INSTALL = "pip install 'tilewright[cutile]'"


class _Constant:
    """Stands for `ct.Constant`, the annotation of a compile-time parameter: `ROWS: ct.Constant[int]`."""

    def __getitem__(self, kind: type) -> type:
        return kind


class _Absent:
    """Stands for cuda.tile: annotations work, everything else says what to install."""

    Constant = _Constant()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BackendError(f"ct.{name} needs cuda.tile, which is not installed: {INSTALL}.")


def version() -> str | None:
    """Of cuda.tile, "1.7.0"; None where it is not installed."""
    try:
        return metadata.version("cuda-tile") if find_spec("cuda.tile") is not None else None
    except (ModuleNotFoundError, metadata.PackageNotFoundError):  # the first: there is no package `cuda` at all
        return None


ct: Any = _Absent() if version() is None else import_module("cuda.tile")
