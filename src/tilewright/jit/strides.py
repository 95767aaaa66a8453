"""Strides as kernels may believe them.

torch leaves the stride of a dimension of one element open: a step that nobody takes may be 0, 1, odd or beyond 32 bits.
So no decision may rest on it, and what a launch says of it must be legal: a multiple of 16 bytes, in 32 bits.
"""

from torch import Tensor

VECTOR = 16  # bytes: the widest access, and what torch's allocators align to


def plain_strides(t: Tensor) -> tuple[int, ...]:
    """Strides of `t`; where a dimension has one element, 1 if it is the last, else whole vectors that hold a row."""
    shape, strides = t.shape, t.stride()
    if 1 not in shape:
        return strides
    found = [strides[-1] if shape[-1] != 1 else 1]
    per_vector = max(1, VECTOR // t.element_size())
    step = -(-shape[-1] * found[0] // per_vector) * per_vector
    for size, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if size != 1:
            step = -(-stride // per_vector) * per_vector
        found.append(stride if size != 1 else step)
    return tuple(reversed(found))
