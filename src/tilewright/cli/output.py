"""What every command shares: where JSON goes, and how a progress line is shown."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.errors import UsageError

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write JSON to FILE; - prints it alone.")
]


def check_writable(*files: str | Path | None) -> None:
    """Raise UsageError before any work is done if a result could not be written."""
    for file in files:
        if file is not None and str(file) != "-":
            path = Path(file)
            if path.is_dir():
                raise UsageError(f"{file} is a folder; give a file name.")
            if path.parent.exists() and not path.parent.is_dir():
                raise UsageError(f"{path.parent} is not a folder.")


def emit(data: Any, text: str, json_file: str | None) -> None:
    """Print `text`, and write `data` as JSON where asked; with `-` only the JSON is printed."""
    if json_file == "-":
        print(json.dumps(data, indent=1, default=str))
        return
    print(text)
    if json_file is not None:
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1, default=str) + "\n")


def say(line: str) -> None:
    """A progress line, on stderr so that JSON on stdout stays clean."""
    print(line, file=sys.stderr, flush=True)


def parse_dtype(name: str | None) -> Any:
    """torch dtype from "bf16", "bfloat16", ...; None stays None."""
    import torch

    if name is None:
        return None
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    full = names.get(name, name)
    if full not in ("bfloat16", "float16", "float32"):
        raise UsageError(f"dtype {name!r}: allowed are bf16, fp16, fp32.")
    return getattr(torch, full)


def parse_case(text: str | None) -> dict[str, Any] | None:
    """{"M": 8, "N": 4096} from "M=8,N=4096"."""
    if text is None:
        return None
    case: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if not sign or not name:
            raise UsageError(f"--case {text}: write it as M=8,N=4096.")
        case[name.strip()] = int(value) if value.strip().lstrip("-").isdigit() else value.strip()
    return case
