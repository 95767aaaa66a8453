"""Types of a CUDA kernel's arguments: annotations of a NamedTuple whose fields bear the kernel's own parameter names.

    class Args(NamedTuple):
        map_a: TensorMap
        bias: Pointer        # None is a null pointer
        alpha: F32
        m: I32
"""

from typing import Annotated, get_type_hints

from torch import Tensor

from tilewright.errors import InputError
from tilewright.jit.tensor_map import TensorMap

Pointer = Annotated[Tensor | None, "P"]
I32 = Annotated[int, "i"]
I64 = Annotated[int, "q"]
F32 = Annotated[float, "f"]
F64 = Annotated[float, "d"]

_CODES = {Pointer: "P", I32: "i", I64: "q", F32: "f", F64: "d", bool: "?", TensorMap: "T", TensorMap | None: "T"}
BYTES = {"P": 8, "i": 4, "q": 8, "f": 4, "d": 8, "?": 1, "T": 128}
"""Size of a parameter of each code."""


def codes(args: type) -> str:
    """One letter for each field, as `jit.driver.Launch` reads them.  Raises InputError for another annotation."""
    letters = []
    for name, annotation in get_type_hints(args, include_extras=True).items():
        if annotation not in _CODES:
            raise InputError(
                f"{args.__name__}.{name} is annotated {annotation}; allowed are Pointer, I32, I64, F32, F64, bool and "
                "TensorMap."
            )
        letters.append(_CODES[annotation])
    return "".join(letters)
