"""The check that a cache folder is safe to load from: a user who can write its machine code can run code as its reader.

Files that belong to this user or to root, and only their owner may write, are read; others are refused by name.  Files
are opened relative to an open folder, and their owner is checked on their own descriptor, so that the checked file is
the file that is read.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.errors import UntrustedError

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Modes of new folders and files: no group may write them, whatever the umask."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def why_not(status: os.stat_result) -> str | None:
    """Why a file or folder with this owner and mode is not loaded, in words; None if it is."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        return f"it belongs to user {status.st_uid}, and this process runs as user {user}"
    if status.st_mode & _OTHERS_WRITE:
        return f"users other than its owner may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def why_not_folder(folder: Path) -> str | None:
    """Why nothing below `folder` is loaded; None if it is trusted or absent."""
    try:
        return why_not(folder.stat())
    except OSError:
        return None


def names(folder: int) -> list[str]:
    """The names of the files in an `opened` folder."""
    return os.listdir(folder)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, for `read`.  Raises UntrustedError, and OSError if it cannot be opened."""
    descriptor = os.open(folder, _READ | os.O_DIRECTORY)
    try:
        if reason := why_not(os.fstat(descriptor)):
            raise UntrustedError(reason)
        yield descriptor
    finally:
        os.close(descriptor)


def read(folder: int, name: str) -> bytes:
    """The contents of the file `name` in an `opened` folder.  Raises UntrustedError and OSError."""
    with os.fdopen(os.open(name, _READ, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{name} is no file")
        if reason := why_not(status):
            raise UntrustedError(f"{name}: {reason}")
        return file.read()
