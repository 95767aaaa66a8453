"""Accumulation of a weight's gradient inside the product that computes it.

A product with `c` and `out` can add to `weight.grad` in place, which saves a pass over it in float32.  It may do so
only when autograd itself would add: in `backward()` of a graph that reaches the weight.  `autograd.grad` returns the
gradient instead, and `backward(inputs=...)` may not need it at all.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from tilewright.dispatch.derivatives import level_is_open
from tilewright.errors import InputError

_STREAMS = "tilewright_streams"
"""Key in a node's metadata: the streams on which a pass adds to the node's gradient in place."""


def is_needed(node: Node | None) -> bool:
    """True if this pass of autograd uses a gradient that goes to `node`.  Call it within a backward."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch raises for a leaf whose gradient `autograd.grad` returns
        return True


def gradient_to_accumulate(parameter: Tensor, node: Node) -> Tensor | None:
    """`parameter.grad`, (N, K) float32, if this pass of autograd adds to it and nothing reads the sum before.

    None if the gradient has to be returned: to `autograd.grad`, to a hook of `register_hook`, as the first one, or
    because it has derivatives.  The caller queues its addition on the current stream before it returns.
    node: the node that accumulates `parameter`'s gradient; `is_needed(node)` holds.
    """
    grad = parameter.grad
    if grad is None or type(grad) is not Tensor or grad.dtype != torch.float32 or not grad.is_contiguous():
        return None
    if torch.is_grad_enabled() or level_is_open() or parameter._backward_hooks or not _accumulates(node):
        return None
    if grad.is_cuda:
        _order(grad.device, node)
    return grad


def _accumulates(node: Node) -> bool:
    """True if `node` adds to the gradient in this pass: not under `autograd.grad`, which returns it."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def _order(device: torch.device, node: Node) -> None:
    """Order the additions of this pass: the current stream after other streams, and autograd's stream after all of
    them.  The caller of `backward` waits for autograd's stream.
    """
    current = torch.cuda.current_stream(device)
    metadata: Any = node.metadata
    streams: list[torch.cuda.Stream] | None = metadata.get(_STREAMS)
    if streams is None:
        streams = metadata[_STREAMS] = []

        def before_accumulating(grads: Any) -> None:
            handle.remove()
            accumulating = torch.cuda.current_stream(device)
            for stream in metadata.pop(_STREAMS):
                if stream != accumulating:
                    accumulating.wait_stream(stream)

        handle = node.register_prehook(before_accumulating)
    for stream in streams:
        if stream != current:
            current.wait_stream(stream)
    if current not in streams:
        streams.append(current)


def forbid_second_derivative(name: str, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradients; taking a second derivative through them raises InputError."""
    guarded: tuple[Tensor, ...] = _NoSecondDerivative.apply(name, torch.zeros((), requires_grad=True), *gradients)
    return guarded


class _NoSecondDerivative(torch.autograd.Function):
    """Identity whose backward raises.  anchor: requires a gradient, so that the results do."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        raise InputError(
            f"{ctx.name} has no second derivative: casts to float8 have none. Leave create_graph=True away, or use "
            "torch.nn.Linear there."
        )
