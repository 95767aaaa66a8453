"""Rounding sizes up."""

_ALIGNMENT = 16  # bytes: alignment of every stride of a tensor map but the innermost


def ceil_div(x: int, y: int) -> int:
    """`x` / `y` rounded up, for x >= 0 and y > 0."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The smallest multiple of `y` that is not below `x`."""
    return ceil_div(x, y) * y


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """The smallest number of elements, at least `x`, that fills whole units of 16 bytes, as TMA needs for a row."""
    return align(x, _ALIGNMENT // element_size)
