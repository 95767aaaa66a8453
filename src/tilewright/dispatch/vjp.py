"""Backward references: the gradient of a forward reference, by torch's own autograd."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet


def vjp(function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Gradients of `function(*inputs)` with respect to every input, for output gradients `grads` (None: output
    unused).
    """
    with _autograd():
        leaves = [(x.clone() if x.is_inference() else x.detach()).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        return torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used])


@contextmanager
def _autograd() -> Iterator[None]:
    """Switch autograd on again where it is off for the thread: inside a raw op, its dispatch keys are masked."""
    keys = (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        exclude = exclude - DispatchKeySet(key)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)
    with torch.inference_mode(False), torch.enable_grad(), guard:
        yield
