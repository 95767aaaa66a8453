"""The C++ `struct Config` with named template parameters, which CUDA and host kernels are instantiated with."""

import math
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import torch

from tilewright.errors import InputError

_CONSTANT, _TYPE = re.compile(r"k[A-Z]\w*", re.ASCII), re.compile(r"[A-Z]\w*", re.ASCII)
_TYPE_NAME = re.compile(r"[A-Za-z_][\w:<>, ]*", re.ASCII)


def config_struct(params: Any, types: Mapping[torch.dtype, str]) -> str:
    """The C++ definition with one member per field of the NamedTuple `params`.  types: C++ names of dtypes.

    The field's annotation decides the C++ type, so that 1, 1.0 and True cannot be mixed; -0.0 is written as 0.0.
    Raises InputError if `params` is no NamedTuple, a value does not fit its annotation, or a name does not have the
    form of its kind.
    """
    if not hasattr(params, "_asdict"):
        raise InputError(f"kernel parameters are a NamedTuple with named, annotated fields; got {params!r}.")
    kinds = get_type_hints(type(params))
    members = "\n".join(f"    {_member(name, kinds[name], value, types)}" for name, value in params._asdict().items())
    return f"struct Config {{\n{members}\n}};\n"


def _member(name: str, kind: Any, value: Any, types: Mapping[torch.dtype, str]) -> str:
    pattern, example = (_TYPE, "Element") if kind in (torch.dtype, str) else (_CONSTANT, "kBlockM")
    if not pattern.fullmatch(name):
        raise InputError(f"kernel parameter {name!r}: a {getattr(kind, '__name__', kind)} is named like {example}.")
    if kind is torch.dtype and value in types:
        return f"using {name} = {types[value]};"
    if kind is str and isinstance(value, str) and _TYPE_NAME.fullmatch(value):
        return f"using {name} = {value};"
    if kind is bool and isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if kind is int and type(value) is int and -(2**63) < value < 2**63:
        is_int64 = not -(2**31) < value < 2**31
        return f"static constexpr {'long long' if is_int64 else 'int'} {name} = {value}{'ll' if is_int64 else ''};"
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        value = float(value) + 0.0  # -0.0 and 0.0 are equal keys: both become 0.0
        return f"static constexpr float {name} = {value.hex()}f;  // {value}"
    raise InputError(
        f"kernel parameter {name}: {value!r} does not fit its annotation {kind}; allowed are int, bool, finite float, "
        f"str (a C++ type) and torch.dtype (of {', '.join(str(d).removeprefix('torch.') for d in types)})."
    )
