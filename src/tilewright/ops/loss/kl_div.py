"""Kullback-Leibler divergence of log-probabilities from a target, as torch's."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import (
    BadInput,
    Contract,
    Cost,
    Gradient,
    Promises,
    RawOp,
    Sample,
    Workload,
    call,
    dispatch,
    register,
)
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import divergence

OP = "kl_div"
KERNELS = ("triton.kl_div",)


class KlDivArgs(NamedTuple):
    input: Tensor  # (M, N)
    target: Tensor  # (M, N)
    log_target: bool
    reduction: str
    batch: int  # by which "batchmean" divides


class KlDivBackwardArgs(NamedTuple):
    target: Tensor  # (M, N)
    dloss: Tensor  # () or (M, N)
    log_target: bool
    reduction: str
    batch: int


@dispatch(OP)
def kl_div(
    input: Tensor,
    target: Tensor,
    *,
    log_target: bool = False,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """target * (log(target) - input) of each element, or exp(target) * (target - input) with log_target, as
    `torch.nn.functional.kl_div`; computed in float32.  `jsd` with beta=0 is the same divergence of logits.

    input: (..., N) bf16|fp16|fp32, log-probabilities   target: probabilities, or their logs, of its shape and dtype;
    rows without one stride, or without a unit stride in a row, cost a copy.
    reduction: "mean" (over elements), "batchmean" (the sum divided by the first dimension), "sum", "none".
    Returns float32: (), or (..., N) for "none".
    A target of 0 gives -0 * input; with log_target a target of -inf gives NaN, as in torch.
    Gradient of input.   target has none, and is refused with requires_grad.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, shapes and options.
    Source: Kullback and Leibler, "On Information and Sufficiency", 1951.
    """
    shape = tuple(input.shape) if isinstance(input, Tensor) else ()
    if isinstance(target, Tensor) and len(shape) not in (0, 2):
        rows.check_same(OP, input=input, target=target)
        input, target = (t.flatten(0, -2) if len(shape) > 1 else t[None] for t in (input, target))
    args = KlDivArgs(input, target, log_target, reduction, shape[0] if shape else 1)
    loss: Tensor = call(CONTRACT, args, backend)
    return loss.view(shape) if reduction == "none" else loss


def reference(input: Tensor, target: Tensor, *, log_target: bool = False, reduction: str = "mean") -> Tensor:
    """torch's own, in float32."""
    return _loss(input, KlDivArgs(input, target, log_target, reduction, input.shape[0]))


def _loss(input: Tensor, args: KlDivArgs | KlDivBackwardArgs) -> Tensor:
    dtype = rows.accumulate_dtype(input.dtype)
    losses = F.kl_div(input.to(dtype), args.target.to(dtype), reduction="none", log_target=args.log_target)
    return losses if args.reduction == "none" else losses.sum() / divisor(args)


def divisor(args: KlDivArgs | KlDivBackwardArgs) -> int:
    """The number by which the sum of the elements is divided; torch warns that "mean" is that of elements."""
    return {"mean": args.target.numel(), "batchmean": args.batch}.get(args.reduction, 1)


def _backward(args: KlDivBackwardArgs) -> Tensor:
    return vjp(lambda x: _loss(x, args), (torch.zeros_like(args.target),), (args.dloss,))[0]


def _outputs(args: KlDivArgs) -> tuple[Any, ...]:
    shape = tuple(args.input.shape) if args.reduction == "none" else ()
    return ((shape, rows.accumulate_dtype(args.input.dtype)),)


FORWARD = RawOp(
    OP,
    "fwd",
    KlDivArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=_outputs,
    reference=lambda args: _loss(args.input, args),
    bucket=lambda args: rows.rows_bucket(args.input),
    bucket_names=rows.RowsBucket._fields,
)
BACKWARD = RawOp(
    OP,
    "bwd",
    KlDivBackwardArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=lambda args: ((args.target.shape, args.target.dtype),),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.target),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: KlDivArgs) -> None:
    """Raise InputError for what the docstring of `kl_div` excludes."""
    rows.check_floating(OP, input=args.input, target=args.target)
    rows.check_same(OP, input=args.input, target=args.target)
    if args.reduction not in divergence.REDUCTIONS:
        raise InputError(f"{OP}: reduction is {args.reduction!r}; needs one of {', '.join(divergence.REDUCTIONS)}.")
    divergence.check_no_gradient(OP, target=args.target)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N; batch=B for (B, M, N); log_target, reduction; zeros to set every third target to 0."""
    shape = (*((params["batch"],) if "batch" in params else ()), params["M"], params["N"])
    x, y = (rows.random_tensor(shape, torch.float32, device, rows.generator(seed + i), 2.0) for i in range(2))
    target = torch.log_softmax(y, -1) if params.get("log_target") else torch.softmax(y, -1)
    if params.get("zeros"):
        target[..., ::3] = 0
    kwargs = {name: params[name] for name in ("log_target", "reduction") if name in params}
    return Sample((torch.log_softmax(x, -1).to(dtype), target.to(dtype)), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads input and target, and for "none" writes the losses.  Backward reads target, writes a gradient."""
    x, target = sample.args
    losses = 4 * x.numel() if sample.kwargs.get("reduction") == "none" else 4
    if direction == "fwd":
        return Cost(4 * x.numel(), rows.nbytes(x, target), losses)
    return Cost(x.numel(), rows.nbytes(target) + losses, rows.nbytes(x))


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        arguments = {"input": torch.ones(4, 8), "target": torch.ones(4, 8), **changes}
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        return Sample((moved.pop("input"), moved.pop("target")), moved)

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name=OP,
        family="loss",
        summary="Kullback-Leibler divergence of log-probabilities",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("input",),
            save=lambda args, outputs: (args.target,),
            raw_args=lambda grads, saved, args, needs: KlDivBackwardArgs(
                saved[0], grads[0], args.log_target, args.reduction, args.batch
            ),
        ),
        workloads=(
            Workload("llama3_4096", {"M": 4096, "N": 128256, "reduction": "batchmean"}),
            Workload("log_target_4096", {"M": 4096, "N": 128256, "reduction": "batchmean", "log_target": True}),
        ),
        cpu_workloads=(Workload("small", {"M": 64, "N": 2048}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("one_row: a single program", {"M": 1, "N": 64, "reduction": "sum"}),
            Workload(
                "odd_n: the tail of a row is masked, a loss for each element", {"M": 5, "N": 77, "reduction": "none"}
            ),
            Workload("n_1: one element a row", {"M": 3, "N": 1}),
            Workload("parts: several programs a row", {"M": 2, "N": 4301, "log_target": True}),
            Workload("batch: divided by the first dimension", {"M": 5, "N": 36, "batch": 2, "reduction": "batchmean"}),
            Workload("zeros: a target of probability 0", {"M": 4, "N": 50, "zeros": True}),
            Workload("empty: no rows", {"M": 0, "N": 64, "reduction": "sum"}),
        ),
        bad_inputs=(
            _bad("integers", "input is torch.int32", input=torch.ones(4, 8, dtype=torch.int32)),
            _bad("other classes", r"target is \(4, 9\)", target=torch.ones(4, 9)),
            _bad("mixed dtypes", "target is .* torch.bfloat16", target=torch.ones(4, 8).bfloat16()),
            _bad("no such reduction", "reduction is 'max'; needs one of batchmean", reduction="max"),
        ),
        batch_dim=None,
        promises=Promises(batch_invariant=False),
    )
)
