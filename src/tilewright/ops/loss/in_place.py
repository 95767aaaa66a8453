"""Cross entropy under autograd whose forward writes the gradient over the logits."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import call_in_place
from tilewright.dispatch.derivatives import Function, has_tangent
from tilewright.errors import InputError
from tilewright.ops.loss import cross_entropy_ as op
from tilewright.ops.loss.arguments import CrossEntropyArgs
from tilewright.ops.loss.scaling import scaled


def loss_with_gradient(args: CrossEntropyArgs, target: Tensor, return_z_loss: bool, backend: str | None) -> Tensor:
    """The loss of `cross_entropy(inplace_grad=True)`."""
    if return_z_loss:
        raise InputError("cross_entropy: inplace_grad has no return_z_loss. Drop one of them.")
    if args.reduction == "none":
        raise InputError(
            "cross_entropy: inplace_grad needs the gradient of the loss in the forward, which reduction='none' does not "
            'know. Use "mean" or "sum", or cross_entropy_(dloss=...).'
        )
    if has_tangent(args.logits):
        raise InputError("cross_entropy: inplace_grad has no forward mode, and logits has a tangent. Drop inplace_grad.")
    if not (torch.is_grad_enabled() and args.logits.requires_grad):
        raise InputError(
            "cross_entropy: inplace_grad writes the gradient of the logits, and none is wanted. Drop inplace_grad."
        )
    if args.logits.is_leaf:
        raise InputError("cross_entropy: inplace_grad would write over logits that are a leaf. Drop inplace_grad.")
    loss: Tensor = _InPlace.apply(args.logits, args, backend)
    return loss


class _InPlace(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, args: CrossEntropyArgs, backend: str | None) -> Tensor:
        written = logits.detach()  # shares memory and version, so that whoever saved the logits learns of the write
        loss, _ = call_in_place(op.CONTRACT, op.in_place_args(args._replace(logits=written), None, None), backend)
        ctx.save_for_backward(written)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise InputError(
                "cross_entropy(inplace_grad=True) has no gradient of its gradient: the logits are gone. Drop inplace_grad."
            )
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, dloss), None, None
