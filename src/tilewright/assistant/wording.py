"""Error messages of other code, short enough for a report and without the user's folders."""

from __future__ import annotations

import re

_FOLDERS = re.compile(r"(?<![\w.~:/])/(?:[^\s/'\",;]+/)+")


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {without_folders(text[0])}" if text else type(error).__name__


def without_folders(text: str) -> str:
    """Shorten each absolute path to its last part: a report is read on other machines."""
    return _FOLDERS.sub("", text)
