"""A call of a raw op as data: what warm-up compiles for and the tuner tells sizes apart by."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import RawOp


class RawCall(NamedTuple):
    """A call of one raw op; its tensors have sizes, strides and dtypes, and no data."""

    op: RawOp
    args: tuple[Any, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that run the same kernels."""
        described = ((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else repr(a) for a in self.args)
        return (self.op.key, *described)

    def on(self, device: str) -> tuple[Any, ...]:
        """The arguments as tensors on `device`: fake ones on a device that need not exist, or "meta"."""

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        return tuple(map(placed, self.args))
