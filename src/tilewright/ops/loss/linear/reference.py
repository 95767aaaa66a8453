"""`linear_cross_entropy` in plain torch, with all logits at once."""

from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops.gemm.dense.args import matmul_args
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.loss import entropy
from tilewright.ops.loss.linear.args import LinearCrossEntropyArgs, LinearCrossEntropyBackwardArgs, options_of


def _loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, args: LinearCrossEntropyArgs | LinearCrossEntropyBackwardArgs
) -> tuple[Tensor, Tensor, Tensor]:
    logits = product(matmul_args(hidden, weight.mT, bias, None, None, 1.0, None))
    return entropy.forward(logits, args.target, args.class_weight, options_of(args))


def _gradients(
    args: LinearCrossEntropyArgs | LinearCrossEntropyBackwardArgs, dloss: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (args.hidden, args.weight, *(() if args.bias is None else (args.bias,)))

    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        loss, lse, _ = _loss(hidden, weight, bias, args)
        return loss, lse

    results = vjp(function, inputs, (dloss, dlse))
    empty = (
        args.hidden.new_empty(0),
        args.weight.new_empty(0),
        (args.weight if args.bias is None else args.bias).new_empty(0),
    )
    needs = args.need_dhidden, args.need_dweight, args.need_dbias and args.bias is not None
    gradients = (*results, None)[:3]
    dhidden, dweight, dbias = (g if w and g is not None else e for g, w, e in zip(gradients, needs, empty, strict=True))
    return dhidden, dweight, dbias


def forward(args: LinearCrossEntropyArgs) -> tuple[Tensor, ...]:
    """Loss, logsumexp, totals, and the gradients that are wanted for a dloss of 1."""
    loss, lse, totals = _loss(args.hidden, args.weight, args.bias, args)
    if args.need_dhidden or args.need_dweight or args.need_dbias:
        return loss, lse, totals, *_gradients(args, loss.new_ones(loss.shape), None)
    empty = (
        args.hidden.new_empty(0),
        args.weight.new_empty(0),
        (args.weight if args.bias is None else args.bias).new_empty(0),
    )
    return loss, lse, totals, *empty


def backward(args: LinearCrossEntropyBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients."""
    return _gradients(args, args.dloss, args.dlse)
