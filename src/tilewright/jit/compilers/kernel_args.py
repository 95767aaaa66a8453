"""Arguments of a kernel by name: a NamedTuple whose fields are the kernel's own C++ parameters, in their order.

    class Args(NamedTuple):
        map_a: Map
        bias: Pointer        # None is a null pointer
        alpha: F32
        m: I32

The names are compared with the kernel's text before it is compiled, so two sizes cannot be exchanged unnoticed.
"""

import re
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from torch import Tensor

from tilewright.errors import InputError
from tilewright.jit.tensor_map import TensorMap

Pointer = Annotated[Tensor | None, "P"]
I32 = Annotated[int, "i"]
I64 = Annotated[int, "q"]
F32 = Annotated[float, "f"]
F64 = Annotated[float, "d"]
Map = TensorMap | None
"""A tensor map; None only while kernels are collected and nothing is launched."""

_CODES: dict[Any, str] = {
    Pointer: "P",
    I32: "i",
    I64: "q",
    F32: "f",
    F64: "d",
    bool: "?",
    Map: "T",
}
BYTES = {"P": 8, "i": 4, "q": 8, "f": 4, "d": 8, "?": 1, "T": 128}
"""Size of a parameter of each code."""


def codes(args: type) -> str:
    """One letter for each field, as launchers read them.  Raises InputError for another annotation."""
    letters = []
    for name, annotation in get_type_hints(args, include_extras=True).items():
        if annotation not in _CODES:
            allowed = "Pointer, I32, I64, F32, F64, bool and Map"
            raise InputError(f"{args.__name__}.{name} is annotated {annotation}; allowed are {allowed}.")
        letters.append(_CODES[annotation])
    return "".join(letters)


def check_names(args: type, file: Path, entry: str, further: tuple[str, ...] = ()) -> None:
    """Raise InputError unless the parameters of `entry` in `file` are named as the fields of `args`, in their order.

    further: parameters that the launcher adds at the end.
    """
    fields, parameters = [*args._fields, *further], parameter_names(file, entry)  # type: ignore[attr-defined]
    if fields != parameters:
        raise InputError(
            f"{entry} in {file.name} has the parameters {', '.join(parameters) or 'of no declaration'}; its arguments "
            f"are {', '.join(fields)}. Give them the same names, in the same order."
        )


def parameter_names(file: Path, entry: str) -> list[str]:
    """Names of the kernel's parameters as its text declares them, in order; [] where they cannot be read."""
    declaration = re.search(rf"\b{entry}\s*\(([^()]*)\)\s*\{{", file.read_text())
    if declaration is None:
        return []
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", declaration[1], flags=re.DOTALL)
    return [words[-1] for parameter in text.split(",") if (words := re.findall(r"\w+", parameter))]
