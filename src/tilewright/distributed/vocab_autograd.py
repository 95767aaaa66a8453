"""Autograd around cross entropy of slices of the vocabulary.

Under "mean" and "sum" the linear form computes its gradients in the forward, chunk by chunk, while it has the logits;
its backward only multiplies them by the gradient of the loss.  Under "none" the backward computes the logits again.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.dispatch.derivatives import Function
from tilewright.distributed import vocab_rows
from tilewright.distributed.vocab_rows import RowGradients, Run, Statistics
from tilewright.distributed.vocab_slice import Labels, VocabSlice
from tilewright.errors import InputError
from tilewright.ops.loss import entropy
from tilewright.ops.loss.entropy import Options
from tilewright.ops.loss.in_place import scaled
from tilewright.ops.loss.linear.args import LinearCrossEntropyArgs, gradient_outputs
from tilewright.ops.loss.linear.chunks import Gradients, chunks_of, logits_of


class Problem(NamedTuple):
    """What a call computes with, beside what has a gradient."""

    op: str
    run: Run
    part: VocabSlice
    labels: Labels
    class_weight: Tensor | None  # (V,), of all classes
    options: Options


class OfLogits(Function):
    """(logits, Problem) -> loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, problem: Problem) -> Tensor:
        _, run, part, labels, class_weight, options = problem
        losses, statistics = vocab_rows.losses(run, part, logits, labels, class_weight, options)
        ctx.problem = problem
        ctx.save_for_backward(logits, *statistics)
        return entropy.reduced(losses, statistics.lse, vocab_rows.totals_of(labels), options)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        op, run, part, labels, class_weight, options = ctx.problem
        _refuse_graph(op)
        logits, *statistics = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradients = vocab_rows.of_batch(dloss, vocab_rows.totals_of(labels), labels, options)
        vocab_rows.write_gradient(
            run, out, part, logits, labels, class_weight, options, Statistics(*statistics), gradients
        )
        return out, None


class OfHidden(Function):
    """(hidden, weight, bias, the same as raw arguments of `linear_cross_entropy`, Problem) -> loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, args: Any, problem: Problem) -> Tensor:
        options, totals = problem.options, vocab_rows.totals_of(problem.labels)
        one_pass = options.reduction != "none" and (args.need_dhidden or args.need_dweight or args.need_dbias)
        losses, statistics, outs = _forward(args, problem, totals if one_pass else None)
        loss = entropy.reduced(losses, statistics.lse, totals, options)
        ctx.args = args._replace(**dict.fromkeys(("hidden", "weight", "bias")))  # saved, if they are needed
        ctx.problem, ctx.one_pass = problem, one_pass
        ctx.save_for_backward(*(outs if one_pass else (hidden, weight, bias, *statistics)))
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        _refuse_graph(ctx.problem.op)
        if ctx.one_pass:
            saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            outs = [scaled(out, dloss) if needed else out for out, needed in saved]
        else:
            hidden, weight, bias, *statistics = ctx.saved_tensors
            args = ctx.args._replace(hidden=hidden, weight=weight, bias=bias)
            outs = _backward(args, ctx.problem, Statistics(*statistics), dloss)
        return *(out if needed else None for out, needed in zip(outs, ctx.needs_input_grad, strict=False)), None, None


def _forward(
    args: LinearCrossEntropyArgs, problem: Problem, totals: Tensor | None
) -> tuple[Tensor, Statistics, list[Tensor]]:
    """(cross entropy of rows, statistics, gradients).   totals: of the batch, where gradients for a dloss of 1 are
    needed.
    """
    _, run, part, labels, class_weight, options = problem
    losses, *numbers = (torch.empty_like(labels.weight) for _ in range(5))
    outs = _outs(args) if totals is not None else []
    gradients = Gradients(run, args, outs)
    for chunk, logits in chunks_of(args):
        logits_of(run, logits, args.hidden[chunk], args.weight, args.bias)
        chunk_labels = labels.rows(chunk)
        losses[chunk], statistics = vocab_rows.losses(run, part, logits, chunk_labels, class_weight, options)
        for out, number in zip(numbers, statistics, strict=True):
            out[chunk] = number
        if totals is not None:
            of_rows = vocab_rows.of_batch(totals.new_ones(()), totals, chunk_labels, options)
            vocab_rows.write_gradient(
                run, logits, part, logits, chunk_labels, class_weight, options, statistics, of_rows
            )
            gradients.add(chunk, logits)
    if totals is not None:
        _finish(gradients, args, part)
    return losses, Statistics(*numbers), outs


def _backward(args: LinearCrossEntropyArgs, problem: Problem, statistics: Statistics, dloss: Tensor) -> list[Tensor]:
    """The gradients, from logits that are computed again."""
    _, run, part, labels, class_weight, options = problem
    outs = _outs(args)
    gradients = Gradients(run, args, outs)
    every = vocab_rows.of_batch(dloss, vocab_rows.totals_of(labels), labels, options)
    for chunk, logits in chunks_of(args):
        logits_of(run, logits, args.hidden[chunk], args.weight, args.bias)
        of_rows = RowGradients(*(t[chunk] for t in every))
        numbers = Statistics(*(t[chunk] for t in statistics))
        chunk_labels = labels.rows(chunk)
        vocab_rows.write_gradient(run, logits, part, logits, chunk_labels, class_weight, options, numbers, of_rows)
        gradients.add(chunk, logits)
    _finish(gradients, args, part)
    return outs


def _outs(args: LinearCrossEntropyArgs) -> list[Tensor]:
    return [args.hidden.new_empty(shape, dtype=dtype) for shape, dtype in gradient_outputs(args)]


def _finish(gradients: Gradients, args: LinearCrossEntropyArgs, part: VocabSlice) -> None:
    """Complete the gradients of a slice, and add up that of hidden over the ranks."""
    gradients.finish()
    if args.need_dhidden:
        dist.all_reduce(gradients.outs[0], group=part.group)


def _refuse_graph(op: str) -> None:
    if torch.is_grad_enabled():
        raise InputError(f"{op} has no gradient of its gradient. Drop create_graph=True.")
