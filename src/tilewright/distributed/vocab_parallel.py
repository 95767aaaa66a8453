"""Cross entropy under tensor parallelism: each rank has the logits, or the rows of the last layer, of some classes."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.dispatch.arguments import as_float, as_int
from tilewright.dispatch.derivatives import level_is_open
from tilewright.dispatch.replay import transforms
from tilewright.distributed.vocab_autograd import OfHidden, OfLogits, Problem
from tilewright.distributed.vocab_rows import runner
from tilewright.distributed.vocab_slice import (
    IGNORED,
    VocabSlice,
    is_dtensor,
    labels_of,
    local_slice,
    replicated,
    require_plain,
)
from tilewright.errors import InputError
from tilewright.nn import LinearCrossEntropyLoss
from tilewright.ops import rows
from tilewright.ops.loss import entropy, linear_cross_entropy
from tilewright.ops.loss.arguments import check_arguments, raw_arguments
from tilewright.ops.loss.entropy import Options
from tilewright.ops.loss.linear.args import LinearCrossEntropyArgs
from tilewright.ops.loss.linear.chunks import rows_of_chunk

LOGITS, LINEAR = "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"
P = ParamSpec("P")


def _eager(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """`function`, which torch.compile leaves to eager mode: it breaks the graph, or fails under fullgraph=True."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # imports Dynamo, so not before
        return function(*args, **kwargs)

    return call


@_eager
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """`ops.cross_entropy` of logits whose classes are divided among the ranks of a group; a collective call.

    logits: (..., V_r) bf16|fp16|fp32, on rank r the r-th part of `torch.chunk(all_logits, ranks, -1)`: the last one may
    be shorter, none is empty.   Or a DTensor (..., V) with Shard(-1) on a mesh of one dimension, as
    torch.distributed.tensor.parallel.loss_parallel takes it.
    target: (...) int64|int32, classes of the whole vocabulary; the same on every rank, as all other arguments are.
    vocab_size, group: V, and the ranks in order (None: all); without a DTensor V is needed.
    class_weight: (V,), the `weight` of `ops.cross_entropy`, of all classes.   Other options as there.

    Returns float32: () or, for "none", (...).  It has the same bits on every rank.  One all_gather of three float32 a
    row, four with label_smoothing.   Gradient of logits, without communication.   No gradients of gradients, forward
    mode or transforms of torch.func; torch.compile leaves the call to eager mode.
    backend: preferred by the ops that this is made of ("triton", "torch").
    Raises InputError for other dtypes, shapes and options, and for a slice that is not the rank's own.
    Source: Shoeybi et al., "Megatron-LM", 2019.
    """
    _refuse_modes(LOGITS)
    logits, part = local_slice(LOGITS, "logits", logits, -1, vocab_size, group)
    target = replicated(LOGITS, "target", target)
    entropy.check_weight(LOGITS, class_weight, part.classes, logits.device)
    args = raw_arguments(
        LOGITS, logits, target, part.of(class_weight), IGNORED, label_smoothing, z_loss, softcap, reduction
    )
    options = _options(LOGITS, ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_arguments(LOGITS, args._replace(target=_checked(LOGITS, part, args.target, options)))
    problem = _problem(LOGITS, part, args.logits, args.target, class_weight, options, backend)
    loss: Tensor = OfLogits.apply(args.logits, problem)
    return loss.view(target.shape) if reduction == "none" else loss


@_eager
def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`ops.linear_cross_entropy` where each rank of a group has some rows of `weight`; a collective call.

    hidden: (..., H) bf16|fp16|fp32, the same on every rank.   bias: (V_r,).
    weight: (V_r, H), on rank r the r-th part of `torch.chunk(whole_weight, ranks)`: the last one may be shorter, none
    is empty.   Or a DTensor (V, H) with Shard(0) on a mesh of one dimension, and `bias` alike.
    target, vocab_size, group, class_weight, backend: as in `vocab_parallel_cross_entropy`.   Others, and the chunks of
    rows, as in `ops.linear_cross_entropy`; chunk_rows is the same on every rank, and so is which tensors require
    gradients.

    Returns float32: () or, for "none", (...).  It has the same bits on every rank.  Each chunk makes one all_gather of
    three float32 a row, four with label_smoothing.
    Gradients: of weight and bias the rank's own, without communication.  That of hidden is whole on every rank: its
    parts, rounded to the dtype of hidden, are added up by an all_reduce, in the forward under "mean" and "sum", else in
    the backward.  A caller that gathered hidden from slices of the sequence takes its slice of the gradient, and adds
    nothing up.   No gradients of gradients, forward mode or transforms of torch.func; torch.compile leaves the call to
    eager mode.
    Raises InputError for other dtypes, shapes and options, and for a slice that is not the rank's own.
    Source: Shoeybi et al., "Megatron-LM", 2019; Hsu et al., "Liger Kernel", 2024.
    """
    _refuse_modes(LINEAR)
    weight, part = local_slice(LINEAR, "weight", weight, 0, vocab_size, group)
    if bias is not None and is_dtensor(bias):
        bias, _ = local_slice(LINEAR, "bias", bias, 0, None, None)
    elif bias is not None:
        require_plain(LINEAR, "bias", bias)
    hidden, target = replicated(LINEAR, "hidden", hidden), replicated(LINEAR, "target", target)
    entropy.check_weight(LINEAR, class_weight, part.classes, weight.device)
    if target.shape != hidden.shape[:-1]:
        raise InputError(f"{LINEAR}: target is {tuple(target.shape)}; needs {tuple(hidden.shape[:-1])}, as hidden.")
    options = _options(LINEAR, ignore_index, label_smoothing, z_loss, softcap, reduction)
    entropy.check_options(LINEAR, options)
    chunk = None if chunk_rows is None else as_int(LINEAR, "chunk_rows", chunk_rows)
    if chunk is not None and chunk < 1:
        raise InputError(f"{LINEAR}: chunk_rows is {chunk_rows}; needs 1 or more, or None.")
    if chunk is None:  # of the longest slice, because all ranks need the same
        chunk = rows_of_chunk(target.numel(), part.longest, hidden.itemsize)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    args = LinearCrossEntropyArgs(
        hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), bias, part.of(class_weight), *options, chunk,
        *needs,
    )  # fmt: skip
    local = _checked(LINEAR, part, args.target, options)
    linear_cross_entropy.check(args._replace(target=local, ignore_index=IGNORED))
    problem = _problem(LINEAR, part, args.hidden, args.target, class_weight, options, backend)
    loss: Tensor = OfHidden.apply(args.hidden, weight, bias, args, problem)
    return loss.view(target.shape) if reduction == "none" else loss


class VocabParallelLinearCrossEntropyLoss(LinearCrossEntropyLoss):
    """`nn.LinearCrossEntropyLoss` under tensor parallelism, by `vocab_parallel_linear_cross_entropy`.

    Made with the whole layer, which `parallelize_module(loss, mesh, {"linear": ColwiseParallel()})` divides: the
    parameters are DTensors with Shard(0), also in the state_dict.  With FSDP2 on another dimension of the mesh, wrap
    the module itself, whose call gathers them.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (..., in_features), the same on every rank   target: (...).   Returns float32: (), or as target."""
        return self._loss_by(vocab_parallel_linear_cross_entropy, replicated(LINEAR, "input", input), target)


def _options(
    op: str, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> Options:
    return Options(
        as_int(op, "ignore_index", ignore_index),
        as_float(op, "label_smoothing", label_smoothing),
        as_float(op, "z_loss", z_loss),
        entropy.as_softcap(op, softcap),
        reduction,
    )


def _checked(op: str, part: VocabSlice, target: Tensor, options: Options) -> Tensor:
    """Targets as the checks of a slice's op see them, after that of their range: ignored, with shape and dtype kept."""
    if not isinstance(target, Tensor) or target.dtype not in entropy.INDICES:
        return target
    entropy.check_range(op, target, part.classes, options.ignore_index)
    return torch.full_like(target, IGNORED)


def _problem(
    op: str, part: VocabSlice, like: Tensor, target: Tensor, class_weight: Tensor | None, options: Options,
    backend: str | None,
) -> Problem:  # fmt: skip
    labels = labels_of(part, target, class_weight, options.ignore_index, rows.accumulate_dtype(like.dtype))
    return Problem(op, runner(backend), part, labels, class_weight, options)


def _refuse_modes(op: str) -> None:
    if level_is_open() or transforms() is not None:
        raise InputError(f"{op} has no forward mode and no transforms of torch.func. Call it outside of them.")
