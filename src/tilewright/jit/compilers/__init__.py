"""Compilers with one interface: source text in, a binary and facts about it out.

`nvrtc` (CUDA C++ in process), `nvcc` (CUDA C++ as an external process), `tileiras` (cuTile), `host` (C++ for the CPU).
Each is one module, imported on first use; none is needed to run a binary that the cache or a bundle already holds.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tilewright.errors import BackendError
from tilewright.errors import CompileError as CompileError
from tilewright.jit.cache import Built

INCLUDE = Path(__file__).parents[1] / "include"
"""The folder of the device headers, and below `tilewright/host` of those for CPU kernels."""

COMPILERS = ("nvrtc", "nvcc", "host", "tileiras")


@dataclass(frozen=True)
class Source:
    """The input of a compiler.  `symbol`: the C++ name expression of the kernel, `tilewright::copy<Config>`."""

    text: str
    name: str
    arch: str
    flags: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    symbol: str | None = None


class Compiler(Protocol):
    """One compiler.  It keeps no state between calls; several threads may compile at once."""

    name: str

    def version(self) -> str | None:
        """The installed version, "13.0.88"; None if not installed.  Looked up once."""

    def install(self) -> str:
        """One line: what to install if `version` is None."""

    def compile(self, source: Source) -> Built:
        """Compile `source`.  Raises CompileError."""


def get_compiler(name: str) -> Compiler:
    """The compiler of that name."""
    if name not in COMPILERS:
        raise BackendError(f"There is no compiler {name!r}; known: {', '.join(COMPILERS)}.")
    compiler: Compiler = importlib.import_module(f"tilewright.jit.compilers.{name}").compiler
    return compiler
