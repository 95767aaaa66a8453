"""Derivatives: torch's autograd around the ops, the gradient of a reference, and forward mode.

No kernel computes a tangent or the gradient of a gradient.  References do, which are plain torch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad


class Function(torch.autograd.Function):
    """Where a `setup_context` is defined, torch's `apply` first binds the arguments by inspection of `forward`, 15 to
    25 us a call.  Only functorch transforms need that; here arguments are positional and complete.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the function to positional arguments; there are no keywords and defaults."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        # Of the C++ base, which mypy does not see
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


def level_is_open() -> bool:
    """Whether tensors may carry tangents here: within `forward_ad.dual_level`, `torch.func.jvp` or `jacfwd`."""
    return forward_ad._current_level >= 0


def has_tangent(*values: Any) -> bool:
    """Whether one of the tensors among `values` carries a tangent."""
    return level_is_open() and any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in values
    )


def vjp(function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Gradients of `function(*inputs)` with respect to every input, for output gradients `grads` (None: output
    unused).

    Where an input or a gradient requires a gradient and autograd is on, the result has a graph, and so a gradient of
    its own.  Tangents of forward mode go through.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _transformed(function, inputs, grads)
    tensors = (*inputs, *(g for g in grads if g is not None))
    twice = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    with _autograd():
        leaves = [_connected(x) if twice or level_is_open() else _detached(x) for x in inputs]
        outputs = function(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        return torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used], create_graph=twice)


def _transformed(
    function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The same inside of torch.func's transforms, where no tensor may be told that it requires a gradient."""
    results: Any = torch.func.vjp(function, *inputs)  # torch declares the form with auxiliary values, too
    outputs, pull = results
    if isinstance(outputs, Tensor):
        return tuple(pull(grads[0]))
    zeros = [torch.zeros_like(o) if g is None else g for o, g in zip(outputs, grads, strict=True)]
    return tuple(pull(tuple(zeros)))


def _detached(x: Tensor) -> Tensor:
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def _connected(x: Tensor) -> Tensor:
    """A tensor of its own, so that one given twice has two gradients, which leads back to x and keeps its tangent."""
    if x.is_inference():
        return _detached(x)
    view = x.view_as(x)
    return view if view.requires_grad else view.requires_grad_()


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
