"""`linear_cross_entropy` by chunks of rows: logits of a chunk, their loss and gradient in place, its two products.

What is held beside arguments, gradients and a few numbers for each row is one chunk of logits, `CHUNK_BYTES`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.ops import rows
from tilewright.ops.gemm import matmul
from tilewright.ops.gemm.dense.args import matmul_args
from tilewright.ops.loss import cross_entropy, entropy
from tilewright.ops.loss.arguments import CrossEntropyArgs
from tilewright.ops.loss.cross_entropy import CrossEntropyBackwardArgs
from tilewright.ops.loss.in_place import IN_PLACE, InPlaceArgs
from tilewright.ops.loss.linear.args import LinearCrossEntropyArgs, LinearCrossEntropyBackwardArgs, options_of

CHUNK_BYTES = 1 << 29
_TILE = 128  # rows of a tile of a product
Run = Callable[..., None]


def rows_of_chunk(m: int, classes: int, itemsize: int) -> int:
    """Rows of a chunk: as few chunks as memory allows, of one size, whole tiles."""
    most = max(1, CHUNK_BYTES // (classes * itemsize))
    if most >= m:
        return m
    most = max(1, most // _TILE * _TILE or most)
    even = -(-m // -(-m // most))
    return min(most, -(-even // _TILE) * _TILE)


def chunks_of(args: LinearCrossEntropyArgs | LinearCrossEntropyBackwardArgs) -> Iterator[tuple[slice, Tensor]]:
    """Rows of each chunk, and memory for their logits, which all chunks share."""
    m, classes = args.hidden.shape[0], args.weight.shape[0]
    size = max(1, min(m, args.chunk_rows or rows_of_chunk(m, classes, args.hidden.itemsize)))
    logits = args.hidden.new_empty((size, classes))
    for begin in range(0, m, size):
        end = min(begin + size, m)
        yield slice(begin, end), logits[: end - begin]


def logits_of(run: Run, out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write hidden @ weight^T + bias."""
    run(matmul.FORWARD, out, *matmul_args(hidden, weight.mT, bias, None, None, 1.0, None))


class Gradients:
    """dhidden, dweight and dbias of arguments that name hidden, weight and bias, to which chunks add."""

    def __init__(self, run: Run, args: Any, outs: Sequence[Tensor]):
        self.run, self.args, self.outs = run, args, outs
        self.dbias: Tensor | None = None
        self.begun = False

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        """Add the share of a chunk, whose dlogits are arguments."""
        args, (dhidden, dweight, _) = self.args, self.outs
        hidden = args.hidden[chunk]
        if args.need_dhidden:
            self.run(matmul.FORWARD, dhidden[chunk], *matmul_args(dlogits, args.weight, None, None, None, 1.0, None))
        if args.need_dweight:
            before = dweight if self.begun else None
            self.run(matmul.FORWARD, dweight, *matmul_args(dlogits.mT, hidden, None, None, before, 1.0, None))
        if args.need_dbias and args.bias is not None:
            share = dlogits.sum(0, dtype=rows.accumulate_dtype(dlogits.dtype))
            self.dbias = share if self.dbias is None else self.dbias + share
        self.begun = True

    def finish(self) -> None:
        """Write what was held in another dtype, and zeros where there was no chunk."""
        if self.dbias is not None:
            self.outs[2].copy_(self.dbias)
        elif not self.begun:
            for out in self.outs:
                out.zero_()


def forward(run: Run, outs: Sequence[Tensor], args: LinearCrossEntropyArgs) -> None:
    """Loss, logsumexp and totals, and the gradients that are wanted."""
    loss, lse, totals, *gradients = outs
    options = options_of(args)
    totals.copy_(entropy.totals_of(args.weight.mT, args.target, args.class_weight, options))
    if args.need_dhidden or args.need_dweight or args.need_dbias:
        _with_gradients(run, loss, lse, totals, gradients, args)
        return
    plain = options._replace(z_loss=0.0, reduction="none")
    losses, rest, unused = torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(totals)
    for chunk, logits in chunks_of(args):
        logits_of(run, logits, args.hidden[chunk], args.weight, args.bias)
        arguments = CrossEntropyArgs(logits, args.target[chunk], args.class_weight, *plain)
        run(cross_entropy.FORWARD, (losses[chunk], lse[chunk], rest[chunk], unused), *arguments)
    loss.copy_(entropy.reduced(losses, lse, totals, options))


def _with_gradients(
    run: Run, loss: Tensor, lse: Tensor, totals: Tensor, outs: Sequence[Tensor], args: LinearCrossEntropyArgs
) -> None:
    """The loss of a chunk and its gradient in one launch; reductions other than "none"."""
    sums, gradients = torch.empty_like(loss), Gradients(run, args, outs)
    loss.zero_()
    for chunk, logits in chunks_of(args):
        logits_of(run, logits, args.hidden[chunk], args.weight, args.bias)
        arguments = InPlaceArgs(logits, args.target[chunk], args.class_weight, None, totals, *options_of(args))
        run(IN_PLACE, (sums, lse[chunk]), *arguments)
        loss += sums
        gradients.add(chunk, logits)
    gradients.finish()


def backward(run: Run, outs: Sequence[Tensor], args: LinearCrossEntropyBackwardArgs) -> None:
    """The gradients, from logits that are computed again."""
    gradients = Gradients(run, args, outs)
    of_rows = args.reduction == "none"
    for chunk, logits in chunks_of(args):
        logits_of(run, logits, args.hidden[chunk], args.weight, args.bias)
        dloss = args.dloss[chunk] if of_rows and args.dloss is not None else args.dloss
        dlse = None if args.dlse is None else args.dlse[chunk]
        arguments = CrossEntropyBackwardArgs(
            logits,
            args.target[chunk],
            args.class_weight,
            args.lse[chunk],
            None,
            args.totals,
            dloss,
            dlse,
            *options_of(args),
        )
        run(cross_entropy.BACKWARD, logits, *arguments)
        gradients.add(chunk, logits)
    gradients.finish()
