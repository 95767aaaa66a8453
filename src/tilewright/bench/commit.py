"""The commit that a result was measured at."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from tilewright.settings import current

_DIGITS = 12


def commit() -> str:
    """The commit of the checkout that runs, 12 digits, with "+" after them where tracked files were changed since.

    `TILEWRIGHT_COMMIT` where it is set: a copy of a checkout has no history to ask.  Empty where neither says it, as
    for an installed wheel.
    """
    return current().commit or _of_checkout(Path(__file__).parent)


@cache
def _of_checkout(folder: Path) -> str:
    """The answer of git, if it tracks the files of `folder`: a checkout around an installed package is another one."""
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return ""
    revision = _git(folder, "rev-parse", f"--short={_DIGITS}", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}{'+' if changed else ''}" if revision else ""


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command in `folder`; None where it fails, or there is no git."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None
