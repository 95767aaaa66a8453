"""Automatic differentiation beyond one backward: forward mode, and gradients of gradients.

No kernel computes them.  Both are answered by the reference, which is plain torch: `call` runs it while a level of
forward mode is open, and `vjp` keeps its graph where a backward is itself differentiated.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_levels: Any = forward_ad  # its `_current_level` is -1 outside of every level; torch.func.jvp and jacfwd open one too


def forward_mode() -> bool:
    """Is a level of forward mode open, so that a tensor may carry a tangent?"""
    return _levels._current_level >= 0


def has_tangent(value: Any) -> bool:
    """Does `value` carry a tangent of the level that is open?"""
    if not forward_mode() or not isinstance(value, Tensor):
        return False
    return forward_ad.unpack_dual(value).tangent is not None


def reference_only() -> bool:
    """Must what is computed here be differentiable, in a backward?  There autograd is on only for a graph of its own
    (`create_graph=True`).
    """
    return torch.is_grad_enabled() or forward_mode()
