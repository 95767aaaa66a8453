"""`linear_jsd` by chunks of rows, and in plain torch with all logits at once.

What is held beside arguments, gradients and a few numbers for each row is one chunk of logits of each side.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops.gemm.dense.args import matmul_args
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.loss import divergence, jsd
from tilewright.ops.loss.jsd import JsdArgs, JsdBackwardArgs
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


def _differentiate(run: Run, args: JsdArgs, statistics: Tensor, count: Tensor, dloss: Tensor, reduction: str) -> Tensor:
    """The gradient of a chunk, over the student's logits."""
    arguments = JsdBackwardArgs(*args[:3], statistics, count, dloss, *args[3:])._replace(reduction=reduction)
    run(jsd.BACKWARD, args.student, *arguments)
    return args.student


def forward(run: Run, outs: Sequence[Tensor], args: LinearJsdArgs) -> None:
    """Loss and count of rows, and the gradients that are wanted."""
    loss, count, *outs_of_gradients = outs
    wanted = args.need_dhidden or args.need_dweight or args.need_dbias
    count.copy_(divergence.count_of(args.hidden, args.target, options_of(args)))
    losses = loss.new_empty(args.hidden.shape[:1])
    one, unused, gradients = torch.ones_like(count), torch.empty_like(count), Gradients(run, args, outs_of_gradients)
    for chunk, arguments in _chunks(run, args):
        statistics = losses.new_empty((chunk.stop - chunk.start, divergence.STATISTICS))
        run(jsd.FORWARD, (losses[chunk], statistics, unused), *arguments)
        if wanted:
            gradients.add(chunk, _differentiate(run, arguments, statistics, count, one, args.reduction))
    loss.copy_(divergence.reduced(losses, count, args.weight.shape[0], args.reduction))
    if wanted:
        gradients.finish()


def backward(run: Run, outs: Sequence[Tensor], args: LinearJsdBackwardArgs) -> None:
    """The gradients, from logits that are computed again."""
    gradients, unused = Gradients(run, args, outs), torch.empty_like(args.count)
    for chunk, arguments in _chunks(run, args):
        losses = args.count.new_empty((chunk.stop - chunk.start,))
        statistics = losses.new_empty((chunk.stop - chunk.start, divergence.STATISTICS))
        run(jsd.FORWARD, (losses, statistics, unused), *arguments)
        dloss = args.dloss[chunk] if args.reduction == "none" else args.dloss
        gradients.add(chunk, _differentiate(run, arguments, statistics, args.count, dloss, args.reduction))
    gradients.finish()


def _loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, args: Args) -> tuple[Tensor, Tensor]:
    student = product(matmul_args(hidden, weight.mT, bias, None, None, 1.0, None))
    teacher = product(
        matmul_args(args.teacher_hidden, args.teacher_weight.mT, args.teacher_bias, None, None, 1.0, None)
    )
    return divergence.forward(student, teacher, args.target, options_of(args))


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
