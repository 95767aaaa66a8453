"""Losses of a linear layer under autograd whose forward computes the gradients, while it has the logits.

Arguments are those of any such op: hidden, weight and bias, a reduction, and the flags `need_dhidden`, `need_dweight`
and `need_dbias`; its first output is the loss and its last three are the gradients.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call
from tilewright.dispatch.derivatives import Function, level_is_open, vjp
from tilewright.dispatch.replay import transforms
from tilewright.ops.loss.in_place import scaled


def suits(args: Any) -> bool:
    """Is a gradient wanted that is that of one number, outside of compilers and transforms, which want it by itself?"""
    return (
        torch.is_grad_enabled()
        and args.reduction in ("batchmean", "mean", "sum")
        and any(isinstance(t, Tensor) and t.requires_grad for t in (args.hidden, args.weight, args.bias))
        and not torch.compiler.is_compiling()
        and not level_is_open()
        and transforms() is None
    )


def loss(contract: Contract, args: Any, backend: str | None) -> Tensor:
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
        args: Any,
        contract: Contract,
        backend: str | None,
    ) -> Tensor:
        flags = ctx.needs_input_grad[:3]
        outputs = call(
            contract, args._replace(need_dhidden=flags[0], need_dweight=flags[1], need_dbias=flags[2]), backend
        )
        tensors = {name: t for name, t in args._asdict().items() if isinstance(t, Tensor)}
        ctx.args = args._replace(**dict.fromkeys(tensors))  # tensors are saved, and checked for changes
        ctx.names, ctx.contract = tuple(tensors), contract
        ctx.save_for_backward(*outputs[-3:], *tensors.values())
        result: Tensor = outputs[0]
        return result

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        dhidden, dweight, dbias, *tensors = ctx.saved_tensors  # once: a checkpoint allows no more
        gradients: tuple[Any, ...] = dhidden, dweight, dbias
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a graph of the gradient is wanted
            args = ctx.args._replace(**dict(zip(ctx.names, tensors, strict=True)))
            names = ("hidden", "weight") if args.bias is None else ("hidden", "weight", "bias")

            def function(*inputs: Tensor) -> Tensor:
                others = args._replace(**dict(zip(names, inputs, strict=True)))
                result: Tensor = ctx.contract.forward.reference(*others)[0]
                return result

            results = vjp(function, [getattr(args, name) for name in names], (dloss,))
            gradients = (*results, None)[:3]
            return *(g if w else None for g, w in zip(gradients, needs, strict=True)), None, None, None
        return *(scaled(g, dloss) if w else None for g, w in zip(gradients, needs, strict=True)), None, None, None
