"""Sparsemax: the nearest point of the simplex, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.ops import rows
from tilewright.ops.reduction.dimension import checked_dim


class SparsemaxArgs(NamedTuple):
    x: Tensor  # (..., N)


class SparsemaxBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    y: Tensor  # (..., N)


@dispatch("sparsemax")
def sparsemax(x: Tensor, dim: int = -1, *, backend: str | None = None) -> Tensor:
    """y = max(x - tau, 0) along `dim`, with the tau for which y sums to 1; in float32, rounded once.

    x: (..., N) bf16|fp16|fp32.   Returns x's shape and dtype: the probabilities nearest to x, most of which are 0.
    -inf gives 0, and a row gives NaN if all of it is -inf or if it has a NaN or +inf.
    Gradient: dy - mean(dy) over the elements with y > 0, 0 for the others; NaN where y is NaN.
    The kernels work along the last dimension; for another dim, x is copied with that dimension last, and the result is
    a transposed view.

    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, a scalar, and a dim that x does not have.
    Source: Martins and Astudillo, "From softmax to sparsemax", 2016.
    """
    dim = checked_dim("sparsemax", x, dim)
    if dim == -1:
        return call(CONTRACT, SparsemaxArgs(x), backend)
    CONTRACT.check(x)  # before movedim, so that messages show the shape of the caller
    return call(CONTRACT, SparsemaxArgs(x.movedim(dim, -1)), backend).movedim(-1, dim)


def reference(x: Tensor, dim: int = -1) -> Tensor:
    """Plain torch: tau by sorting, in float32."""
    return _forward(SparsemaxArgs(x.movedim(dim, -1))).movedim(-1, dim)


def _forward(args: SparsemaxArgs) -> Tensor:
    x = args.x.to(rows.accumulate_dtype(args.x.dtype))
    if x.shape[-1] == 0:
        return args.x.clone()
    row_max = x.detach().amax(-1, keepdim=True)
    z = (x - row_max) * torch.where(row_max.isfinite(), 1.0, torch.nan)  # the factor makes gradients NaN too
    largest = z.sort(-1, descending=True).values
    sums = largest.cumsum(-1) - 1
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    support = (largest * count > sums).sum(-1, keepdim=True).clamp(min=1)
    return (z - sums.gather(-1, support - 1) / support).clamp(min=0).to(args.x.dtype)


def _backward(args: SparsemaxBackwardArgs) -> Tensor:
    dy = args.dy.to(rows.accumulate_dtype(args.y.dtype))
    support = args.y > 0
    mean = torch.where(support, dy, 0).sum(-1, keepdim=True) / support.sum(-1, keepdim=True).clamp(min=1)
    dx = torch.where(support, dy - mean, 0).to(args.y.dtype)
    return torch.where(args.y.isnan(), args.y, dx)


KERNELS = ("triton.sparsemax",)

FORWARD = RawOp(
    "sparsemax",
    "fwd",
    SparsemaxArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
)
BACKWARD = RawOp(
    "sparsemax",
    "bwd",
    SparsemaxBackwardArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.y.shape, args.y.dtype),),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.y),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: SparsemaxArgs) -> None:
    """Raise InputError for what the docstring of `sparsemax` excludes."""
    rows.check_floating("sparsemax", x=args.x)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional scale; inner=K for x (M, N, K) and dim=1; hidden=True to set every third element of odd
    rows to -inf; equal=True for rows of one number.
    """
    shape = (params["M"], params["N"], *((params["inner"],) if "inner" in params else ()))
    x = rows.random_tensor(shape, dtype, device, rows.generator(seed), scale=params.get("scale", 1.0))
    if params.get("hidden"):
        x[1::2, ::3] = -torch.inf
    if params.get("equal"):
        x = x[:, :1].repeat(1, params["N"])
    return Sample((x,), {"dim": 1} if "inner" in params else {})


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and writes y.  Backward reads dy and y, writes dx."""
    (x,) = sample.args
    if direction == "fwd":
        return Cost(20 * x.numel(), rows.nbytes(x), rows.nbytes(x))
    return Cost(4 * x.numel(), rows.nbytes(x, x), rows.nbytes(x))


def _ones(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


CONTRACT = register(
    Contract(
        name="sparsemax",
        family="softmax",
        summary="the nearest point of the simplex, along one dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: outputs,
            raw_args=lambda grads, saved, args, needs: SparsemaxBackwardArgs(*grads, *saved),
        ),
        workloads=(
            Workload("scores_4k", {"M": 8192, "N": 4096}),
            Workload("vocabulary_32k", {"M": 4096, "N": 32768}),
            Workload("llama3_vocabulary", {"M": 4096, "N": 128256}),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("n_1: the result is 1", {"M": 5, "N": 1}),
            Workload("flat: many elements share", {"M": 4, "N": 50, "scale": 0.01}),
            Workload("equal: all elements are the largest", {"M": 2, "N": 40, "equal": True}),
            Workload("masked: -inf in some rows", {"M": 4, "N": 60, "hidden": True}),
            Workload("inner_dim: along dimension 1 of 3", {"M": 3, "N": 40, "inner": 8}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("integers", lambda d: Sample((_ones((4, 8), d, torch.int32),)), "x is torch.int32"),
            BadInput("scalar", lambda d: Sample((_ones((), d),)), "no dimensions"),
            BadInput(
                "no such dim", lambda d: Sample((_ones((4, 8), d),), {"dim": 2}), "dim is 2, .* needs -2 <= dim < 2"
            ),
        ),
    )
)
