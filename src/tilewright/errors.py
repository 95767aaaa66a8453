"""The exception tree: catch `TilewrightError` for anything this library raises on purpose.

TilewrightError
├── InputError (ValueError)         a tensor or option an op cannot take: shape, dtype, device, layout
├── BackendError (RuntimeError)     a backend cannot run this call, or failed: compiling, loading or launching a kernel
│   └── RefusedError                the backend asked for does not take this call; says why and what would
│       └── KernelMissingError      its kernel is in no cache, and the compiler is not installed
├── VerificationError               a result or a patched model failed its accuracy rule
├── PatchError                      a model could not be patched, or nothing in it was replaceable
├── TableError (ValueError)         a tuning table that must not be used: schema, architecture, contents
└── UsageError                      wrong command-line input: one line, exit code 2
"""


class TilewrightError(Exception):
    """Base of every error this library raises on purpose."""


class InputError(TilewrightError, ValueError):
    """An argument an op cannot take.  Raised before any launch; nothing was written."""


class BackendError(TilewrightError, RuntimeError):
    """A backend cannot run this call, or failed at it: a kernel was not compiled, loaded or launched."""


class RefusedError(BackendError):
    """The backend asked for does not take this call, as planning knows.  Nothing was launched."""


class KernelMissingError(RefusedError):
    """A kernel that would have to be compiled where its compiler is not installed.  Nothing was launched."""


class VerificationError(TilewrightError):
    """A result or a patched model failed its accuracy rule."""


class PatchError(TilewrightError):
    """A model could not be patched, or nothing in it was replaceable."""


class TableError(TilewrightError, ValueError):
    """A tuning table that must not be used."""


class UsageError(TilewrightError):
    """Wrong input from a user of the command line; shown as one line, exit code 2."""
