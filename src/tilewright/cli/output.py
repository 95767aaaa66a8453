"""Output of commands.  Paths are checked before the work begins; a run of many cases writes after each of them."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import UsageError


def check_writable(*files: str | Path | None) -> None:
    """Raise UsageError before any work is done if a result could not be written.  Touches nothing."""
    for file in files:
        if file is None or str(file) == "-":
            continue
        path = Path(file).absolute()
        if path.is_dir() or str(file).endswith(os.sep):
            raise UsageError(f"{file} is a folder; give a file name.")
        existing = path if path.exists() else next(folder for folder in path.parents if folder.exists())
        if existing != path and not existing.is_dir():
            raise UsageError(f"{file} cannot be written: {existing} is not a folder.")
        if not os.access(existing, os.W_OK):
            raise UsageError(f"{file} cannot be written: no permission for {existing}.")


def write(file: str | Path, text: str) -> None:
    """Write a result, and create the folders above it.

    An existing file is replaced at once, if its folder is writable, so no reader sees half a result.
    """
    path = Path(file).resolve()
    replaces = path.is_file() and os.access(path.parent, os.W_OK)
    draft = path.with_name(f".{path.name}.{os.getpid()}") if replaces else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        if replaces:
            draft.unlink(missing_ok=True)
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from error


def write_json(text: str, json_file: str | None) -> None:
    """Write JSON to the file of `--json`, to stdout for `-`, and nowhere without it."""
    if json_file == "-":
        print(text.rstrip("\n"))
    elif json_file is not None:
        write(json_file, text.rstrip("\n") + "\n")


def emit(data: Any, text: str, json_file: str | None) -> None:
    """Print `text`, and write `data` as JSON if `--json` asks for it; with `-` only the JSON is printed.

    NaN and infinity, which JSON does not have, become null.
    """
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    write_json(json.dumps(finite, indent=1), json_file)
    if json_file != "-":
        print(text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines; columns are as wide as their longest text, and two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say(line: str) -> None:
    """Print a progress line to stderr, so that stdout holds nothing but JSON."""
    print(line, file=sys.stderr, flush=True)
