"""The exception tree: catch `TilewrightError` for anything this library raises on purpose.

TilewrightError
├── InputError (ValueError)         a tensor or option an op cannot take: shape, dtype, device, layout
├── BackendError (RuntimeError)     a backend cannot run this call, or failed: compiling, loading or launching a kernel
│   ├── RefusedError                the requested backend does not take this call; says why, and which one would
│   │   └── KernelMissingError      its kernel is in no cache, and the compiler is not installed
│   └── CompileError                a compiler rejected the source of a kernel
├── VerificationError               a result or a patched model failed its accuracy rule
├── PatchError                      a model could not be patched, or nothing in it was replaceable
├── TableError (ValueError)         a tuning table that must not be used: schema, architecture, contents
├── CorruptError                    a damaged entry of the kernel cache; the cache compiles it again
├── UntrustedError                  a file of the kernel cache that another user may write; the cache does not load it
├── ServerError                     a server that was asked over HTTP did not answer as asked
└── UsageError                      wrong command-line input: one line, exit code 2

A class whose name ends in Error is in this tree.  Exceptions with other names carry control flow inside one room and
never reach a caller.
"""

import re
from typing import Any

_ERROR_LINE = re.compile(r"\berror\b|\bundefined reference\b", re.IGNORECASE)
_COUNT_LINE = re.compile(r"^\d+ (?:catastrophic )?errors? detected")
_SHOWN_LINES = 8


class TilewrightError(Exception):
    """Base of every error this library raises on purpose."""


class InputError(TilewrightError, ValueError):
    """An argument an op cannot take.  Raised before any launch; nothing was written."""


class BackendError(TilewrightError, RuntimeError):
    """A backend cannot run this call, or failed at it: a kernel was not compiled, loaded or launched."""


class RefusedError(BackendError):
    """The requested backend does not take this call, as planning found.  Nothing was launched."""


class KernelMissingError(RefusedError):
    """A kernel that would have to be compiled where its compiler is not installed.  Nothing was launched."""


class CompileError(BackendError):
    """A compiler rejected a source.  `source`: a `jit.compilers.Source`; `log`: all of the compiler's output."""

    def __init__(self, compiler: str, source: Any, log: str) -> None:
        super().__init__(f"{compiler} cannot compile {source.name} for {source.arch}:\n{_first_errors(log)}")
        self.compiler, self.source, self.log = compiler, source, log

    def __reduce__(self) -> tuple[type["CompileError"], tuple[str, Any, str]]:
        """Pickle the arguments, so that a worker process can send the error to its parent."""
        return CompileError, (self.compiler, self.source, self.log)


class VerificationError(TilewrightError):
    """A result or a patched model failed its accuracy rule."""


class PatchError(TilewrightError):
    """A model could not be patched, or nothing in it was replaceable."""


class TableError(TilewrightError, ValueError):
    """A tuning table that must not be used."""


class CorruptError(TilewrightError):
    """An entry of the kernel cache is there and cannot be used; says why."""


class UntrustedError(TilewrightError):
    """Another user may have written this file or folder; says who."""


class ServerError(TilewrightError):
    """A server did not answer a request as asked.   kind: a few words, the same for all failures of a kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message

    def __reduce__(self) -> tuple[type["ServerError"], tuple[str, str]]:
        """Pickle the arguments, not the text that they make."""
        return ServerError, (self.kind, self.message)


class UsageError(TilewrightError):
    """Wrong input from a user of the command line; shown as one line, exit code 2."""


def _first_errors(log: str) -> str:
    """The first lines of a compiler's log that report an error, or its first lines if none does."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line) and not _COUNT_LINE.match(line)] or lines
    more = len(errors) - _SHOWN_LINES
    return "\n".join([*errors[:_SHOWN_LINES], *([f"... and {more} more lines"] if more > 0 else [])]) or "(no output)"
