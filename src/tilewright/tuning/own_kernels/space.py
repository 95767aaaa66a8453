"""The configurations that a user's launch function may be called with, and the sizes a choice depends on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import SymInt

from tilewright.dispatch.bucket import hint
from tilewright.errors import InputError

Config = dict[str, Any]
Sizes = tuple[tuple[str, int | str], ...]
Constraint = Callable[[dict[str, Any], Config], bool]
"""(key, config) -> does this configuration fit a call with this key?"""

_PLAIN = (int, float, str, bool, type(None))
_SEPARATORS = set(",=")


class Space(NamedTuple):
    """Every combination of the values, that of the default first."""

    names: tuple[str, ...]
    configs: tuple[Config, ...]

    def fitting(self, sizes: Sizes, constraint: Constraint | None) -> tuple[Config, ...]:
        """The configurations that the constraint lets through for a key."""
        if constraint is None:
            return self.configs
        return tuple(config for config in self.configs if constraint(dict(sizes), dict(config)))


def declare(name: str, values: Mapping[str, Sequence[Any]], default: Mapping[str, Any] | None) -> Space:
    """The space of these values.  Raises InputError for an empty one, and for what a table cannot hold."""
    if not values:
        raise InputError(
            f"tune({name}): the space is empty. Name a parameter and its values: space={{'BLOCK': (64,)}}."
        )
    for parameter, choices in values.items():
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise InputError(f"tune({name}): {parameter} is {choices!r}; needs a tuple of one or more values.")
        for value in choices:
            if type(value) not in _PLAIN:
                raise InputError(
                    f"tune({name}): {parameter} has the value {value!r}, a {type(value).__name__}; a table holds int, "
                    "float, str, bool and None."
                )
    configs = [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]
    if default is not None:
        first = next((config for config in configs if equal(config, default)), None)
        if first is None:
            raise InputError(f"tune({name}): the default {dict(default)} is not in the space.")
        configs.remove(first)
        configs.insert(0, first)
    return Space(tuple(values), tuple(configs))


def equal(config: Config, values: Mapping[str, Any]) -> bool:
    """Are these the values of `config`?  1 and True are two values."""
    return set(config) == set(values) and all(
        type(values[name]) is type(value) and values[name] == value for name, value in config.items()
    )


def sizes_of(name: str, key: Any) -> Sizes:
    """What the key function returned, checked.  Raises InputError for anything but names with ints and strings."""
    if not isinstance(key, Mapping) or not key:
        raise InputError(f"tune({name}): key returned {key!r}; needs a dict of sizes such as {{'M': x.shape[0]}}.")
    return tuple([(field, _size(name, field, value)) for field, value in key.items()])


def _size(name: str, field: Any, value: Any) -> int | str:
    if type(value) is int or (type(value) is str and not _SEPARATORS & set(value)):
        if type(field) is str and field and not _SEPARATORS & set(field):
            return value
        raise InputError(f"tune({name}): a key has the name {field!r}; needs a string without ',' and '='.")
    if isinstance(value, SymInt):  # fake tensors: the size of the example inputs
        return hint(value)
    if type(value) is str:
        raise InputError(f"tune({name}): key {field} is {value!r}; ',' and '=' separate the fields of a row.")
    raise InputError(f"tune({name}): key {field} is {value!r}, a {type(value).__name__}; needs an int or a string.")


def text(pairs: Iterable[tuple[str, Any]]) -> str:
    """Names and values as a row of a table writes them: "M=4096,N=1024"."""
    return ",".join(f"{name}={value}" for name, value in pairs)
