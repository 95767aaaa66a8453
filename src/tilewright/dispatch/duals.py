"""Forward-mode derivatives.  No kernel computes them: while a level is open, references run, which are plain torch."""

from typing import Any

from torch import Tensor
from torch.autograd import forward_ad


def level_is_open() -> bool:
    """Whether tensors may carry tangents here: within `forward_ad.dual_level`, `torch.func.jvp` or `jacfwd`."""
    return forward_ad._current_level >= 0


def has_tangent(*values: Any) -> bool:
    """Whether one of the tensors among `values` carries a tangent."""
    return level_is_open() and any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in values
    )
