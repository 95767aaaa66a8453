"""The logarithm of a sum of exponentials, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
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
from tilewright.ops import rows
from tilewright.ops.reduction import softmax as plain
from tilewright.ops.reduction.dimension import checked_dim


class LogsumexpArgs(NamedTuple):
    x: Tensor  # (..., N)


class LogsumexpBackwardArgs(NamedTuple):
    x: Tensor  # (..., N)
    lse: Tensor  # (...), before it was rounded
    dy: Tensor  # (...), of y and lse together


@dispatch("logsumexp")
def logsumexp(x: Tensor, dim: int = -1, keepdim: bool = False, *, backend: str | None = None) -> Tensor:
    """y = max(x) + log(sum(exp(x - max(x)))) along `dim`, in float32, rounded once.

    x: (..., N) bf16|fp16|fp32.   Returns x's dtype and its shape without `dim`, or with 1 there if keepdim.
    As in torch: -inf adds nothing, a row of only -inf gives -inf and a NaN gradient, +inf gives inf, NaN gives NaN.
    The gradient is exp(x - y) by the float32 y, which is kept beside the rounded one.
    The kernels work along the last dimension; for another dim, x is copied with that dimension last.

    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, a scalar, and a dim that x does not have.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    dim = checked_dim("logsumexp", x, dim)
    if dim != -1:
        CONTRACT.check(x)  # before movedim, so that messages show the shape of the caller
        x = x.movedim(dim, -1)
    y, _ = call(CONTRACT, LogsumexpArgs(x), backend)
    return y.unsqueeze(dim) if keepdim else y


def reference(x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    """Plain torch, in float32."""
    return torch.logsumexp(x.to(rows.accumulate_dtype(x.dtype)), dim, keepdim).to(x.dtype)


def _forward(args: LogsumexpArgs) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(args.x.to(rows.accumulate_dtype(args.x.dtype)), -1)
    return lse.to(args.x.dtype), lse.clone()


def _backward(args: LogsumexpBackwardArgs) -> Tensor:
    x, lse, dy = args
    return (dy.to(lse.dtype)[..., None] * torch.exp(x.to(lse.dtype) - lse[..., None])).to(x.dtype)


KERNELS = ("triton.logsumexp",)

FORWARD = RawOp(
    "logsumexp",
    "fwd",
    LogsumexpArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.x.shape[:-1], args.x.dtype),
        (args.x.shape[:-1], rows.accumulate_dtype(args.x.dtype)),
    ),
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    count=2,
)
BACKWARD = RawOp(
    "logsumexp",
    "bwd",
    LogsumexpBackwardArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: LogsumexpArgs) -> None:
    """Raise InputError for what the docstring of `logsumexp` excludes."""
    rows.check_floating("logsumexp", x=args.x)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: as in `softmax`, and optional keepdim."""
    sample = plain.inputs(params, dtype, device, seed)
    return Sample(sample.args, {**sample.kwargs, **({"keepdim": True} if "keepdim" in params else {})})


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and writes two numbers a row.  Backward reads x, writes dx."""
    (x,) = sample.args
    numbers = x.numel() // max(1, x.shape[-1])
    if direction == "fwd":
        return Cost(4 * x.numel(), rows.nbytes(x), numbers * (x.itemsize + 4))
    return Cost(3 * x.numel(), rows.nbytes(x) + numbers * (x.itemsize + 4), rows.nbytes(x))


def _save(args: LogsumexpArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    _, lse = outputs
    return args.x, lse


def _raw_args(grads: Any, saved: Any, args: LogsumexpArgs, needs: Any) -> LogsumexpBackwardArgs:
    (dy, dlse), (x, lse) = grads, saved
    if dlse is not None:  # of a gradient that is itself differentiated: it is computed from lse
        dy = dlse if dy is None else dlse + dy
    return LogsumexpBackwardArgs(x, lse, dy)


def _ones(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


CONTRACT = register(
    Contract(
        name="logsumexp",
        family="softmax",
        summary="logarithm of the sum of exponentials along one dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(BACKWARD, inputs=("x",), save=_save, raw_args=_raw_args),
        workloads=(
            Workload("vocabulary_32k", {"M": 4096, "N": 32768}),
            Workload("llama3_vocabulary", {"M": 4096, "N": 128256}),
            Workload("decode_8", {"M": 8, "N": 128256}, directions=("fwd",)),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("odd_n: rows begin between two vectors", {"M": 7, "N": 333}),
            Workload("n_1: the result is x", {"M": 5, "N": 1}),
            Workload("few: many rows a program", {"M": 77, "N": 8}),
            Workload("long_row: divided among programs", {"M": 2, "N": 20001}),
            Workload("masked: -inf in some rows", {"M": 6, "N": 300, "hidden": lambda dtype: -torch.inf}),
            Workload("inner_dim: along dimension 1 of 3", {"M": 3, "N": 40, "inner": 8, "keepdim": True}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("integers", lambda d: Sample((_ones((4, 8), d, torch.int32),)), "x is torch.int32"),
            BadInput("scalar", lambda d: Sample((_ones((), d),)), "no dimensions"),
            BadInput(
                "no such dim", lambda d: Sample((_ones((4, 8), d),), {"dim": 2}), "dim is 2, .* needs -2 <= dim < 2"
            ),
        ),
        promises=Promises(batch_invariant=False),
    )
)
