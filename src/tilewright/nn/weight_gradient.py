"""Where the gradient of a weight goes in one pass of autograd.

A product that takes `c` and `out` can add to `weight.grad` in place, which spares a pass over it in float32.  It may do
so only where autograd itself would add: in `backward()` of a graph that reaches the weight.  `autograd.grad` takes the
gradient back instead, and `backward(inputs=...)` may not want it at all.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from tilewright.dispatch.derivatives import level_is_open
from tilewright.errors import InputError

_STREAMS = "tilewright_streams"
"""The entry of a node's metadata that names the streams on which a pass adds to its gradient in place."""


def wanted(node: Node | None) -> bool:
    """Whether this pass of autograd uses a gradient that goes to `node`.  To be asked within a backward."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer for a leaf whose gradient `autograd.grad` returns
        return True


def total(parameter: Tensor, node: Node) -> Tensor | None:
    """`parameter.grad`, (N, K) float32, if this pass of autograd is about to add to it and nobody sees the sum before.

    None where the gradient has to be returned: to `autograd.grad`, to a hook of `register_hook`, as the first one, or
    because it has derivatives of its own.  The caller queues its addition on the current stream before it returns.
    node: the one that accumulates `parameter`'s gradient, `wanted` in this pass.
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
    """Whether `node` adds to the gradient in this pass: not under `autograd.grad`, which returns it."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def _order(device: torch.device, node: Node) -> None:
    """Let the current stream add after other streams of this pass, and autograd, which also lets the caller of
    `backward` wait for its own stream, after the current one.
    """
    here = torch.cuda.current_stream(device)
    metadata: Any = node.metadata
    streams: list[torch.cuda.Stream] | None = metadata.get(_STREAMS)
    if streams is None:
        streams = metadata[_STREAMS] = []

        def before_accumulating(grads: Any) -> None:
            handle.remove()
            theirs = torch.cuda.current_stream(device)
            for stream in metadata.pop(_STREAMS):
                if stream != theirs:
                    theirs.wait_stream(stream)

        handle = node.register_prehook(before_accumulating)
    for stream in streams:
        if stream != here:
            here.wait_stream(stream)
    if here not in streams:
        streams.append(here)


def refuse_second(name: str, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradients, from which no second derivative is to be had: InputError where one is taken."""
    handed: tuple[Tensor, ...] = _Refusal.apply(name, torch.zeros((), requires_grad=True), *gradients)
    return handed


class _Refusal(torch.autograd.Function):
    """anchor: a tensor that requires a gradient, so that the results do."""

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
