"""Options that several commands share, and how their text is read."""

import re
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.errors import UsageError

if TYPE_CHECKING:
    import torch

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Dtype(StrEnum):
    """Element types on the command line."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Direction(StrEnum):
    """Forward or backward of an op."""

    fwd = "fwd"
    bwd = "bwd"


JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write JSON to FILE; - prints it alone.")
]
OpArgument = Annotated[str, typer.Argument(metavar="OP", help="An op's name; see `tilewright ops`.")]
DirectionOption = Annotated[Direction | None, typer.Option("--direction", help="Forward or backward; default: both.")]
DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="Element type; default: what the case declares.")]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help="Exactly this backend: cuda, cutile, triton, cpu or torch."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="cuda, cuda:1, cpu; default: the GPU if there is one.")
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="File of that key, which no list of processes shows.", dir_okay=False),
]


def device(name: str | None, *, planned: bool = False) -> str:
    """Return `name` if this machine has that device; None means its GPU, or its CPU if there is none.

    planned: the call is only planned, so a GPU need not be here.  Raises UsageError for any other name.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if gpus else "cpu"
    try:
        parsed = torch.device(name)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cuda", "cpu"):
        raise UsageError(f"--device {name}: allowed are cuda, cuda:N and cpu.")
    if parsed.type == "cuda" and (parsed.index or 0) >= gpus and not (planned and gpus == 0):
        raise UsageError(f"--device {name}: torch sees {gpus} GPUs here." + ("" if gpus else " Use cpu."))
    return name


def torch_dtype(name: Dtype | None) -> "torch.dtype | None":
    """The torch dtype; None stays None."""
    import torch

    types = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}
    return None if name is None else types[name]


def names(text: str | None) -> list[str] | None:
    """["a", "b"] from "a, b"; None stays None."""
    return None if text is None else [name.strip() for name in text.split(",")]


def lengths(text: str) -> tuple[int, ...]:
    """(1024, 1000) from "1024,1000"."""
    parts = names(text) or []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--tokens {text}: write lengths as 1024,1000.")
    return tuple(map(int, parts))


def seconds(budget: str) -> float:
    """90.0 from "90", "90s" or "1.5m"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", budget.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget {budget}: write it as 90s, 5m or 1h.")
    return float(match[1]) * _UNITS[match[2] or "s"]


def key(api_key: str | None, file: Path | None) -> str | None:
    """The key of a server, given as it is or in a file."""
    if file is None:
        return api_key
    if api_key is not None:
        raise UsageError("--api-key and --api-key-file exclude each other.")
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file} cannot be read: {error}.") from None
    if not text:
        raise UsageError(f"--api-key-file {file} is empty; needs the key.")
    return text


def need(extra: str, *modules: str) -> None:
    """Raise UsageError if an optional library is missing: now, rather than after the work."""
    absent = [name for name in modules if find_spec(name) is None]
    if absent:
        raise UsageError(f"this needs {', '.join(absent)}: pip install 'tilewright[{extra}]'.")
