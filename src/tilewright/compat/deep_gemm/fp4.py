"""Casts to and from FP4 with DeepGEMM's names.  They can be imported, as its tests do on every GPU; a call raises
BackendError, because Hopper's tensor cores have no FP4.
"""

from typing import Any, NoReturn

from tilewright.errors import BackendError


def per_token_cast_to_fp4(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises BackendError: only Blackwell has FP4."""
    _refuse("per_token_cast_to_fp4")


def transpose_packed_fp4(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises BackendError: only Blackwell has FP4."""
    _refuse("transpose_packed_fp4")


def cast_back_from_fp4(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises BackendError: only Blackwell has FP4."""
    _refuse("cast_back_from_fp4")


def _refuse(name: str) -> NoReturn:
    raise BackendError(
        f"{name}: Hopper's tensor cores have no FP4, which is Blackwell's, and this module has it nowhere. Cast to "
        "float8 with per_token_cast_to_fp8."
    )
