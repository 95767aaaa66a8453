"""What arguments of an op may be: numbers in the types that a schema declares, and tensors that lie in strided memory.

A kernel is compiled for the types of its scalars, and a signature is remembered by their values: numpy's numbers and an
int for a float become Python's, and a tensor, whose value may change from call to call, is refused.  Shape, strides and
address are what every op reads first; of sparse and nested tensors torch has none, and would answer with internal
errors, at another place for each kind.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import torch
from torch import Tensor

from tilewright.errors import InputError

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

Size = Annotated[int, "SymInt"]
"""Annotation of an argument that `torch.compile` may keep symbolic; a plain `int` is a constant of the graph."""

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    Size: "SymInt",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}


def schema_of(args: type, mutates: Sequence[str] = ()) -> str:
    """torch's schema of the fields of a NamedTuple: "Tensor x, Tensor? weight, float eps"; a tensor of `mutates` is
    "Tensor(m0!) cache".

    Raises InputError for a field whose annotation has no schema type, and for a tensor that follows a scalar.
    """
    declared = []
    scalar = ""
    for name, annotation in get_type_hints(args, include_extras=True).items():
        kind = _SCHEMA_TYPES.get(annotation)
        if kind is None:
            allowed = ", ".join(getattr(t, "__name__", str(t)) for t in _SCHEMA_TYPES)
            raise InputError(f"{args.__name__}.{name} is annotated {annotation}; allowed are {allowed}.")
        if "Tensor" in kind and scalar:
            raise InputError(f"{args.__name__}: tensor {name} follows {scalar}; tensors come first.")
        if "Tensor" not in kind:
            scalar = name
        if name in mutates:
            kind = kind.replace("Tensor", f"Tensor(m{mutates.index(name)}!)")
        declared.append(f"{kind} {name}")
    return ", ".join(declared)


def as_declared(raw: "RawOp", args: Sequence[Any]) -> tuple[Any, ...]:
    """`args` with each scalar as Python's float, int or bool.  Raises InputError for what is none."""
    count = raw.tensor_count
    scalars = [
        convert(raw.op, name, value) if convert is not None else value
        for value, (name, convert) in zip(args[count:], raw.scalars, strict=True)
    ]
    return (*args[:count], *scalars)


def converters(schema: str) -> list[tuple[str, Callable[[str, str, Any], Any] | None]]:
    """(name, conversion) of each argument of a raw op's schema that is no tensor; None where any value may pass."""
    declared = [argument.split() for argument in schema.split(", ")]
    return [(name, _KINDS.get(kind)) for kind, name in declared if "Tensor" not in kind]


def as_float(op: str, name: str, value: Any) -> Any:
    """`value` as Python's float, or InputError."""
    return _number(op, name, value, float, numbers.Real, "a number")


def as_int(op: str, name: str, value: Any) -> Any:
    """`value` as Python's int, or InputError."""
    return _number(op, name, value, int, numbers.Integral, "an integer")


def _number(op: str, name: str, value: Any, kind: type, accepted: type, allowed: str) -> Any:
    if type(value) is kind or isinstance(value, _SYMBOLIC):
        return value
    if isinstance(value, accepted) and not isinstance(value, bool):
        return kind(value)
    raise _refused(op, name, value, allowed)


def as_bool(op: str, name: str, value: Any) -> Any:
    """`value` as a bool, or InputError."""
    if type(value) is bool or isinstance(value, _SYMBOLIC):
        return value
    if type(value).__name__ in ("bool", "bool_") or (isinstance(value, numbers.Integral) and value in (0, 1)):
        return bool(value)
    raise _refused(op, name, value, "True or False")


_KINDS: dict[str, Callable[[str, str, Any], Any]] = {
    "float": as_float,
    "int": as_int,
    "SymInt": as_int,
    "bool": as_bool,
}


def _refused(op: str, name: str, value: Any, allowed: str) -> InputError:
    hint = " Call .item() on it, which waits for its device." if isinstance(value, Tensor) else ""
    return InputError(f"{op}: {name} is a {type(value).__name__}; needs {allowed}.{hint}")


def refuse_layout(op: str, **arguments: Any) -> None:
    """Raise InputError if one of the arguments, or of a list among them, is a tensor without strides."""
    for name, value in arguments.items():
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, Tensor) and (t.is_nested or t.layout is not torch.strided):
                what, advice = _words(t)
                raise InputError(f"{op}: {name} is {what}; needs a dense tensor (torch.strided). {advice}")


def _words(t: Tensor) -> tuple[str, str]:
    if t.is_nested:
        return f"a nested tensor ({t.layout})", "Pad it with to_padded_tensor, or call the op on its values()."
    kind = "sparse" if "sparse" in str(t.layout) else "stored"
    return f"{kind} ({t.layout})", "Call .to_dense() first."
