"""`linear_jsd` by chunks of rows, and in plain torch with all logits at once.

What is held beside arguments, gradients and a few numbers for each row is one chunk of logits of each side.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.gemm.dense.args import matmul_args
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.loss import cross_entropy, divergence, entropy, jsd
from tilewright.ops.loss.arguments import CrossEntropyArgs
from tilewright.ops.loss.in_place import IN_PLACE, InPlaceArgs
from tilewright.ops.loss.jsd import JsdArgs
from tilewright.ops.loss.linear.chunks import Gradients, Run, logits_of, rows_of_chunk
from tilewright.ops.loss.linear.jsd_args import LinearJsdArgs, LinearJsdBackwardArgs, options_of

Args = LinearJsdArgs | LinearJsdBackwardArgs


def _chunks(run: Run, args: Args) -> Iterator[tuple[slice, JsdArgs]]:
    """Rows of each chunk and its divergence for each row, in memory for logits that all chunks share."""
    m, classes = args.hidden.shape[0], args.weight.shape[0]
    size = min(m, args.chunk_rows or rows_of_chunk(m, classes, 2 * args.hidden.itemsize))
    student, teacher = (args.hidden.new_empty((size, classes)) for _ in range(2))
    options = options_of(args)._replace(reduction="none")
    for begin in range(0, m, size):
        chunk = slice(begin, min(begin + size, m))
        of_student, of_teacher = (t[: chunk.stop - begin] for t in (student, teacher))
        logits_of(run, of_student, args.hidden[chunk], args.weight, args.bias)
        logits_of(run, of_teacher, args.teacher_hidden[chunk], args.teacher_weight, args.teacher_bias)
        target = None if args.target is None else args.target[chunk]
        yield chunk, JsdArgs(of_student, of_teacher, target, *options)


def _of_rows(args: Args, count: Tensor, dloss: Tensor) -> Tensor:
    """The gradient of the loss of each row, from that of the loss."""
    if args.reduction == "none":
        return dloss
    return divergence.reduced(dloss, count, args.weight.shape[0], args.reduction).repeat(args.hidden.shape[0])


def _hard_options(args: Args) -> entropy.Options:
    return entropy.Options(args.ignore_index, 0.0, 0.0, 0.0, "none")


def _mixed(args: Args, soft: Tensor, hard: Tensor) -> Tensor:
    return (1 - args.hard_weight) * soft + args.hard_weight * hard


def _differentiate(run: Run, args: Args, chunk: JsdArgs, statistics: Tensor, dlosses: Tensor) -> Tensor | None:
    """Write the gradient of a chunk over the student's logits.   Returns the cross entropy of its rows, if wanted."""
    soft, hard = dlosses * (1 - args.hard_weight), dlosses * args.hard_weight
    out = chunk.teacher if args.hard_weight else chunk.student
    unused = statistics.new_empty(())
    run(jsd.BACKWARD, out, *chunk[:3], statistics, unused, soft, *chunk[3:])
    if chunk.target is None or not args.hard_weight:
        return None
    losses, lse = torch.empty_like(hard), torch.empty_like(hard)
    run(IN_PLACE, (losses, lse), *InPlaceArgs(chunk.student, chunk.target, None, hard, None, *_hard_options(args)))
    chunk.student.add_(chunk.teacher)
    return losses


def _cross_entropy(run: Run, args: Args, chunk: JsdArgs) -> Tensor | None:
    if chunk.target is None or not args.hard_weight:
        return None
    dtype = rows.accumulate_dtype(chunk.student.dtype)
    losses, lse, rest = (chunk.student.new_empty(chunk.target.shape, dtype=dtype) for _ in range(3))
    totals = losses.new_empty((entropy.TOTALS,))
    arguments = CrossEntropyArgs(chunk.student, chunk.target, None, *_hard_options(args))
    run(cross_entropy.FORWARD, (losses, lse, rest, totals), *arguments)
    return losses


def forward(run: Run, outs: Sequence[Tensor], args: LinearJsdArgs) -> None:
    """Loss and count of rows, and the gradients that are wanted."""
    loss, count, *outs_of_gradients = outs
    with_gradients = args.need_dhidden or args.need_dweight or args.need_dbias
    count.copy_(divergence.count_of(args.hidden, args.target, options_of(args)))
    losses, unused = loss.new_empty(args.hidden.shape[:1]), torch.empty_like(count)
    gradients, dlosses = Gradients(run, args, outs_of_gradients), _of_rows(args, count, torch.ones_like(loss))
    for chunk, arguments in _chunks(run, args):
        soft = losses[chunk]
        statistics = soft.new_empty((*soft.shape, divergence.STATISTICS))
        run(jsd.FORWARD, (soft, statistics, unused), *arguments)
        if with_gradients:
            hard = _differentiate(run, args, arguments, statistics, dlosses[chunk])
            gradients.add(chunk, arguments.student)
        else:
            hard = _cross_entropy(run, args, arguments)
        if hard is not None:
            soft.copy_(_mixed(args, soft, hard))
    loss.copy_(divergence.reduced(losses, count, args.weight.shape[0], args.reduction))
    if with_gradients:
        gradients.finish()


def backward(run: Run, outs: Sequence[Tensor], args: LinearJsdBackwardArgs) -> None:
    """The gradients, from logits that are computed again."""
    gradients, unused = Gradients(run, args, outs), torch.empty_like(args.row_count)
    every = _of_rows(args, args.row_count, args.dloss)
    for chunk, arguments in _chunks(run, args):
        dlosses = every[chunk]
        statistics = dlosses.new_empty((*dlosses.shape, divergence.STATISTICS))
        run(jsd.FORWARD, (torch.empty_like(dlosses), statistics, unused), *arguments)
        _differentiate(run, args, arguments, statistics, dlosses)
        gradients.add(chunk, arguments.student)
    gradients.finish()


def _loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, args: Args) -> tuple[Tensor, Tensor]:
    student = product(matmul_args(hidden, weight.mT, bias, None, None, 1.0, None))
    teacher = product(
        matmul_args(args.teacher_hidden, args.teacher_weight.mT, args.teacher_bias, None, None, 1.0, None)
    )
    losses = divergence.row_losses(student, teacher, args.target, options_of(args))
    if args.target is not None and args.hard_weight:
        losses = _mixed(args, losses, entropy.row_losses(student, args.target, None, _hard_options(args))[0])
    count = divergence.count_of(student, args.target, options_of(args))
    return divergence.reduced(losses, count, student.shape[1], args.reduction), count


def _gradients(args: Args, dloss: Tensor) -> tuple[Tensor, ...]:
    inputs = (args.hidden, args.weight, *(() if args.bias is None else (args.bias,)))

    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _loss(hidden, weight, bias, args)[0]

    needs = args.need_dhidden, args.need_dweight, args.need_dbias and args.bias is not None
    if not any(needs):
        return _empty(args)
    results = (*vjp(function, inputs, (dloss,)), None)[:3]
    return tuple(g if w and g is not None else e for g, w, e in zip(results, needs, _empty(args), strict=True))


def _empty(args: Args) -> tuple[Tensor, ...]:
    bias = args.weight if args.bias is None else args.bias
    return args.hidden.new_empty(0), args.weight.new_empty(0), bias.new_empty(0)


def reference(args: LinearJsdArgs) -> tuple[Tensor, ...]:
    """Loss, count, and the gradients that are wanted for a dloss of 1."""
    loss, count = _loss(args.hidden, args.weight, args.bias, args)
    return loss, count, *_gradients(args, torch.ones_like(loss))


def reference_backward(args: LinearJsdBackwardArgs) -> tuple[Tensor, ...]:
    """The gradients."""
    return _gradients(args, args.dloss)
