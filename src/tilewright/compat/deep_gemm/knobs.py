"""DeepGEMM's process-wide settings that have no effect here: a program may set them and read them back.

This library chooses the sizes that a kernel is compiled for, its tiles and the overlap of launches by measurements on
the GPU; results are the same.
"""

from collections.abc import Sequence

from tilewright.errors import InputError

_overlaps = [False]
_utilisation = [100]


def set_pdl(enable_pdl: bool) -> None:
    """Store whether launches may overlap, for `get_pdl`.  Raises InputError for anything but a bool."""
    _overlaps[0] = _truth("set_pdl", enable_pdl)


def get_pdl() -> bool:
    """The value of `set_pdl`; initially False."""
    return _overlaps[0]


def set_tc_util(tc_util: int) -> None:
    """Store the percentage of time that tensor cores may be busy, for `get_tc_util`; DeepGEMM reads it on Blackwell.

    Raises InputError outside of 0 to 100.
    """
    if not isinstance(tc_util, int) or not 0 <= tc_util <= 100:
        raise InputError(f"set_tc_util({tc_util!r}): needs a percentage, 0 to 100.")
    _utilisation[0] = tc_util


def get_tc_util() -> int:
    """The value of `set_tc_util`; initially 100."""
    return _utilisation[0]


def set_ignore_compile_dims(new_value: bool) -> None:
    """Accept whether sizes are run-time arguments of kernels.  Raises InputError for anything but a bool."""
    _truth("set_ignore_compile_dims", new_value)


def set_block_size_multiple_of(value: int | Sequence[int]) -> None:
    """Accept the numbers that rows and columns of tiles are multiples of: one for both, or (rows, columns).

    Raises InputError for anything but one or two positive numbers.
    """
    numbers = [value] if isinstance(value, int) else list(value)
    if len(numbers) not in (1, 2) or any(not isinstance(n, int) or n < 1 for n in numbers):
        raise InputError(f"set_block_size_multiple_of({value!r}): needs one positive number, or two: rows and columns.")


def _truth(name: str, value: bool) -> bool:
    if not isinstance(value, (bool, int)):
        raise InputError(f"{name}({value!r}): needs True or False.")
    return bool(value)
