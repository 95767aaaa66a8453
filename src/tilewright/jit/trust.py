"""Whether a cache folder may be loaded from: whoever can write its machine code can run code as its reader.

What belongs to this user or to root, and is writable by its owner alone, is read; anything else is refused by name.
Files are opened below a folder that is open already and asked for their owner through their own descriptors, so that
what was checked is what is read.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Of what the cache makes: no umask lets a group write it."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def refusal(found: os.stat_result) -> str | None:
    """Why something with this owner and mode is not loaded, in words; None where it is."""
    own = os.geteuid()
    if found.st_uid not in (own, 0):
        return f"it belongs to user {found.st_uid}, and this process runs as user {own}"
    if found.st_mode & _OTHERS_WRITE:
        return f"users other than its owner may write it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def refusal_of(folder: Path) -> str | None:
    """Why nothing below `folder` is loaded; None where it is trusted, or not there."""
    try:
        return refusal(folder.stat())
    except OSError:
        return None


def names(folder: int) -> list[str]:
    """What an `opened` folder holds."""
    return os.listdir(folder)


class UntrustedError(Exception):
    """Somebody else may have written this; says who."""


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, to `read` below it.  Raises UntrustedError, and OSError where it cannot be opened."""
    descriptor = os.open(folder, _READ | os.O_DIRECTORY)
    try:
        if reason := refusal(os.fstat(descriptor)):
            raise UntrustedError(reason)
        yield descriptor
    finally:
        os.close(descriptor)


def read(folder: int, name: str) -> bytes:
    """The contents of the file `name` in an `opened` folder.  Raises UntrustedError and OSError."""
    with os.fdopen(os.open(name, _READ, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedError(f"{name} is no file")
        if reason := refusal(found):
            raise UntrustedError(f"{name}: {reason}")
        return file.read()
