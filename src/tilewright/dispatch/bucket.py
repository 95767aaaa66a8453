"""Sizes as tuning keys.  Works on SymInts too, by their hints and without guards: a bucket may be stale, never
wrong.
"""

from typing import Any

INVARIANT_ROWS = 4096
"""The row bucket every batch falls into under `numerics("batch_invariant")`."""


def hint(n: Any) -> int:
    """`n` itself, or the size a symbolic integer had in the example inputs (4096 where it has none)."""
    if type(n) is int:
        return n
    value = n.node.hint if hasattr(n, "node") else int(n)
    return 4096 if value is None else int(value)


def row_bucket(n: Any) -> int:
    """`n` rounded up to a power of two: 1, 2, 4, ..."""
    return 1 << (max(hint(n), 1) - 1).bit_length()
