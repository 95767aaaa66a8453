"""Compilers behind one interface: text in, a binary with the facts about it out.

`nvrtc` (CUDA C++ in process), `nvcc` (CUDA C++ as an external process), `tileiras` (cuTile), `host` (C++ for the CPU).
Each is one module here, imported when it is first asked for; none is needed to run a binary that the cache or a bundle
already holds.
"""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tilewright.errors import BackendError
from tilewright.jit.cache import Built

INCLUDE = Path(__file__).parents[1] / "include"
"""The device headers, and below `tilewright/host` those of the CPU kernels."""

COMPILERS = ("nvrtc", "nvcc", "host", "tileiras")
_ERROR_LINE = re.compile(r"\berror\b|\bundefined reference\b", re.IGNORECASE)
_COUNT_LINE = re.compile(r"^\d+ (?:catastrophic )?errors? detected")
_SHOWN = 8


@dataclass(frozen=True)
class Source:
    """What a compiler is given.  `symbol`: the C++ name expression of the kernel wanted, `tilewright::copy<Config>`."""

    text: str
    name: str
    arch: str
    flags: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    symbol: str | None = None


class Compiler(Protocol):
    """One compiler.  Stateless towards its callers; several threads may compile at once."""

    name: str

    def version(self) -> str | None:
        """What is installed here, "13.0.88"; None where it is not.  Looked up once."""

    def install(self) -> str:
        """One line: what to install where `version` is None."""

    def compile(self, source: Source) -> Built:
        """The binary of `source`.  Raises CompileError."""


class CompileError(BackendError):
    """A compiler refused a source.  `log` is everything it said."""

    def __init__(self, compiler: str, source: Source, log: str) -> None:
        super().__init__(f"{compiler} cannot compile {source.name} for {source.arch}:\n{_first_errors(log)}")
        self.compiler, self.source, self.log = compiler, source, log

    def __reduce__(self) -> tuple[type["CompileError"], tuple[str, Source, str]]:
        """Survives the way home from a worker process."""
        return CompileError, (self.compiler, self.source, self.log)


def get_compiler(name: str) -> Compiler:
    """The compiler of that name."""
    if name not in COMPILERS:
        raise BackendError(f"There is no compiler {name!r}; known: {', '.join(COMPILERS)}.")
    compiler: Compiler = importlib.import_module(f"tilewright.jit.compilers.{name}").compiler
    return compiler


def _first_errors(log: str) -> str:
    """The lines of a log that say what is wrong, or its head where no line does."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    found = [line for line in lines if _ERROR_LINE.search(line) and not _COUNT_LINE.match(line)] or lines
    more = len(found) - _SHOWN
    return "\n".join([*found[:_SHOWN], *([f"... and {more} more lines"] if more > 0 else [])]) or "(no output)"
