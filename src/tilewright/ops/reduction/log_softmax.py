"""The logarithm of softmax, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.reduction import softmax as plain
from tilewright.ops.reduction.dimension import checked_dim


class LogSoftmaxArgs(NamedTuple):
    x: Tensor  # (..., N)
    dtype: torch.dtype  # of y: x's, or float32 of 16 bits
    x_dtype: torch.dtype  # of x, and of its gradient


class LogSoftmaxBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    y: Tensor  # (..., N)
    dtype: torch.dtype  # of dx


@dispatch("log_softmax")
def log_softmax(
    x: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = (x - max(x)) - log(sum(exp(x - max(x)))) along `dim`, in float32, rounded once.

    x: (..., N) bf16|fp16|fp32.   Returns x's shape, in `dtype`, by default x's.
    dtype: x is cast to it first, as in torch; float32 of 16-bit x costs no cast, because the kernels compute in it.
    The gradient is computed from y as it was rounded, as torch's is: float32 y of 16-bit x gives an exacter one.
    As in torch, -inf gives -inf, and a row gives NaN if all of it is -inf or if it has a NaN or +inf.
    The kernels work along the last dimension; for another dim, x is copied with that dimension last, and the result is
    a transposed view.

    out: contiguous tensor to write instead of allocating, for the last dimension only; no gradient then.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, a scalar, and a dim that x does not have.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (for rows too long for registers).
    """
    dim = checked_dim("log_softmax", x, dim)
    if dtype is None:
        dtype = x.dtype
    elif dtype not in rows.FLOATS:
        raise InputError(f"log_softmax: dtype is {dtype}; needs one of bfloat16, float16, float32, or None for x's.")
    elif dtype not in (x.dtype, rows.accumulate_dtype(x.dtype)):
        CONTRACT.check(x, dtype, x.dtype)
        x = x.to(dtype)
    if dim == -1:
        return call(CONTRACT, LogSoftmaxArgs(x, dtype, x.dtype), backend, out)
    if out is not None:
        raise InputError(f"log_softmax(out=...) works along the last dimension, dim is {dim}. Drop out=.")
    CONTRACT.check(x, dtype, x.dtype)  # before movedim, so that messages show the shape of the caller
    return call(CONTRACT, LogSoftmaxArgs(x.movedim(dim, -1), dtype, x.dtype), backend).movedim(-1, dim)


def reference(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Plain torch, which computes in float32."""
    x = x if dtype is None or dtype == rows.accumulate_dtype(x.dtype) else x.to(dtype)
    return _forward(LogSoftmaxArgs(x.movedim(dim, -1), dtype or x.dtype, x.dtype)).movedim(-1, dim)


def _forward(args: LogSoftmaxArgs) -> Tensor:
    return torch.log_softmax(args.x, -1, dtype=args.dtype)


def _backward(args: LogSoftmaxBackwardArgs) -> Tensor:
    dtype = rows.accumulate_dtype(args.y.dtype)
    dy, y = args.dy.to(dtype), args.y.to(dtype)
    return (dy - torch.exp(y) * dy.sum(-1, keepdim=True)).to(args.dtype)


KERNELS = ("triton.softmax_unaligned", "triton.softmax")

FORWARD = RawOp(
    "log_softmax",
    "fwd",
    LogSoftmaxArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.dtype),),
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "log_softmax",
    "bwd",
    LogSoftmaxBackwardArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.y.shape, args.dtype),),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.y),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: LogSoftmaxArgs) -> None:
    """Raise InputError for what the docstring of `log_softmax` excludes."""
    rows.check_floating("log_softmax", x=args.x)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: as in `softmax`, and optional dtype."""
    sample = plain.inputs(params, dtype, device, seed)
    return Sample(sample.args, {**sample.kwargs, **({"dtype": params["dtype"]} if "dtype" in params else {})})


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and writes y.  Backward reads dy and y, writes dx."""
    (x,) = sample.args
    y_bytes = x.numel() * sample.kwargs.get("dtype", x.dtype).itemsize
    if direction == "fwd":
        return Cost(5 * x.numel(), rows.nbytes(x), y_bytes)
    return Cost(4 * x.numel(), 2 * y_bytes, rows.nbytes(x))


def _raw_args(grads: Any, saved: Any, args: LogSoftmaxArgs, needs: Any) -> LogSoftmaxBackwardArgs:
    (dy,), (y,) = grads, saved
    return LogSoftmaxBackwardArgs(dy, y, args.x_dtype)


def _ones(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


CONTRACT = register(
    Contract(
        name="log_softmax",
        family="softmax",
        summary="logarithm of softmax along one dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: outputs,
            raw_args=_raw_args,
        ),
        workloads=(
            Workload("vocabulary_32k", {"M": 4096, "N": 32768}),
            Workload("llama3_vocabulary", {"M": 4096, "N": 128256}),
            Workload("llama3_logprobs: float32 of bf16 logits", {"M": 4096, "N": 128256, "dtype": torch.float32}),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("n_1: the result is 0", {"M": 5, "N": 1}),
            Workload("few: many rows a program", {"M": 77, "N": 8}),
            Workload("long_row: longer than registers, divided among programs", {"M": 2, "N": 40001}),
            Workload("masked: -inf in some rows", {"M": 6, "N": 300, "hidden": lambda dtype: -torch.inf}),
            Workload("widened: float32 of any dtype", {"M": 6, "N": 270, "dtype": torch.float32}),
            Workload("inner_dim: along dimension 1 of 3", {"M": 3, "N": 40, "inner": 8}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("integers", lambda d: Sample((_ones((4, 8), d, torch.int32),)), "x is torch.int32"),
            BadInput("scalar", lambda d: Sample((_ones((), d),)), "no dimensions"),
            BadInput(
                "no such dim", lambda d: Sample((_ones((4, 8), d),), {"dim": 2}), "dim is 2, .* needs -2 <= dim < 2"
            ),
            BadInput(
                "integers wanted", lambda d: Sample((_ones((4, 8), d),), {"dtype": torch.int32}), "dtype is torch.int32"
            ),
        ),
    )
)
