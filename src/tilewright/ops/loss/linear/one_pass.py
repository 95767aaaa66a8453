"""`linear_cross_entropy` under autograd whose forward computes the gradients, while it has the logits."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call
from tilewright.dispatch.derivatives import Function, level_is_open, vjp
from tilewright.dispatch.replay import transforms
from tilewright.ops.loss.in_place import scaled
from tilewright.ops.loss.linear import reference
from tilewright.ops.loss.linear.args import LinearCrossEntropyArgs

_INPUTS = ("hidden", "weight", "bias")


def _wanted(args: LinearCrossEntropyArgs) -> tuple[bool, ...]:
    return tuple(isinstance(t, Tensor) and t.requires_grad for t in (args.hidden, args.weight, args.bias))


def suits(args: LinearCrossEntropyArgs) -> bool:
    """Is a gradient wanted that is that of one number, outside of compilers and transforms, which want it by itself?"""
    return (
        torch.is_grad_enabled()
        and args.reduction in ("mean", "sum")
        and any(_wanted(args))
        and not torch.compiler.is_compiling()
        and not level_is_open()
        and transforms() is None
    )


def loss(contract: Contract, args: LinearCrossEntropyArgs, backend: str | None) -> Tensor:
    """The loss, with a graph."""
    contract.check(*args)  # what requires a gradient and has none, before it is detached
    result: Tensor = _OnePass.apply(args.hidden, args.weight, args.bias, args, contract, backend)
    return result


class _OnePass(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        args: LinearCrossEntropyArgs,
        contract: Contract,
        backend: str | None,
    ) -> Tensor:
        flags = ctx.needs_input_grad[:3]
        args = args._replace(need_dhidden=flags[0], need_dweight=flags[1], need_dbias=flags[2])
        result, _, _, *gradients = call(contract, args, backend)
        ctx.options = args[5:]
        ctx.save_for_backward(hidden, weight, bias, args.target, args.class_weight, *gradients)
        return result

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, target, class_weight, *gradients = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a graph of the gradient is wanted
            args = LinearCrossEntropyArgs(hidden, weight, target, bias, class_weight, *ctx.options)
            inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
            results = vjp(lambda *tensors: reference.loss(*tensors, args=args), inputs, (dloss,))
            gradients = [*results, None][:3]
            return *(g if w else None for g, w in zip(gradients, needs, strict=True)), None, None, None
        return *(scaled(g, dloss) if w else None for g, w in zip(gradients, needs, strict=True)), None, None, None
