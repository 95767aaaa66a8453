"""Gradients scaled down to a norm."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import grad_norm
from tilewright.optim.gradients import with_gradients


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Multiply all gradients by min(1, max_norm / (norm + 1e-6)), in place; returns the norm before, () float32.

    parameters: a tensor or several, of any dtypes and devices; those without a gradient are left out.
    norm_type:  1, 2 or infinity: the norm of the norms of the gradients, each by `ops.grad_norm`, in float32: the same
                bits in every run, and nothing is read on the host.
    error_if_nonfinite: raise RuntimeError, with the gradients as they were, for a norm that is NaN or infinite, which
                waits for the device.

    What `torch.nn.utils.clip_grad_norm_` does, which rounds norm and factor to the gradients' dtype.
    Raises InputError for other norms, sparse and sharded gradients.
    """
    params = with_gradients("clip_grad_norm_", [parameters] if isinstance(parameters, Tensor) else list(parameters))
    norm_type = float(norm_type)
    if norm_type not in (1.0, 2.0, math.inf):
        raise InputError(f"clip_grad_norm_: norm_type is {norm_type}; needs 1, 2 or infinity. Others: torch.nn.utils.")
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm = total_norm(grads, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} is {norm.item()}; it must be finite.")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for kind in dict.fromkeys((g.device, g.dtype) for g in grads):
        torch._foreach_mul_([g for g in grads if (g.device, g.dtype) == kind], factor.to(kind[0]))
    return norm


def total_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the norms of one gradient or more, () float32 on the device of the first."""
    norms = [grad_norm(g, norm_type=norm_type).to(grads[0].device) for g in grads]
    return grad_norm(torch.stack(norms), norm_type=norm_type)
