"""A call of a raw op as data: what warm-up compiles for and the tuner tells sizes apart by."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tilewright.dispatch import RawOp


class RawCall(NamedTuple):
    """A call of one raw op; its tensors, also those of a list, have sizes, strides and dtypes, and no data."""

    op: RawOp
    args: tuple[Any, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that run the same kernels."""
        leaves, structure = tree_flatten(self.args)
        described = ((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else repr(a) for a in leaves)
        return (self.op.key, str(structure), *described)

    def on(self, device: str) -> tuple[Any, ...]:
        """The arguments as tensors on `device`: fake ones on a device that need not exist, or "meta"."""

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        placed_args: tuple[Any, ...] = tree_map(placed, self.args)
        return placed_args
