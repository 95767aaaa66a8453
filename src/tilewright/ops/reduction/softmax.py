"""Softmax, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import as_int
from tilewright.errors import InputError
from tilewright.ops import rows


class SoftmaxArgs(NamedTuple):
    x: Tensor  # (..., N)


class SoftmaxBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    y: Tensor  # (..., N)


@dispatch("softmax")
def softmax(x: Tensor, dim: int = -1, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) along `dim`, in float32, rounded once.

    x: (..., N) bf16|fp16|fp32.   Returns x's shape and dtype.
    As in torch, -inf gives 0, and a row gives NaN if all of it is -inf or if it has a NaN or +inf.
    The kernels work along the last dimension; for another dim, x is copied with that dimension last, and the result is
    a transposed view.

    out: contiguous tensor to write instead of allocating, for the last dimension only; no gradient then.
    backend: run on exactly this backend ("triton", "cutile", "cpu", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, a scalar, and a dim that x does not have.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (for rows too long for registers).
    """
    if type(dim) is not int:
        dim = as_int("softmax", "dim", dim)
    if dim == -1 or dim == x.dim() - 1:
        return call(CONTRACT, SoftmaxArgs(x), backend, out)
    if not -x.dim() <= dim < x.dim():
        raise InputError(f"softmax: dim is {dim}, x is {tuple(x.shape)}; needs {-x.dim()} <= dim < {x.dim()}.")
    if out is not None:
        raise InputError(f"softmax(out=...) works along the last dimension, dim is {dim}. Drop out=.")
    CONTRACT.check(x)  # before movedim, so that messages show the shape of the caller
    return call(CONTRACT, SoftmaxArgs(x.movedim(dim, -1)), backend).movedim(-1, dim)


def reference(x: Tensor, dim: int = -1) -> Tensor:
    """Plain torch: along the last dimension it computes in float32 and rounds once, on every device."""
    return torch.softmax(x.movedim(dim, -1), -1).movedim(-1, dim)


KERNELS = ("triton.softmax_unaligned", "triton.softmax", "cutile.softmax", "cpu.softmax")

FORWARD = RawOp(
    "softmax",
    "fwd",
    SoftmaxArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: torch.softmax(args.x, -1),
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "softmax",
    "bwd",
    SoftmaxBackwardArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.y.shape, args.y.dtype),),
    reference=lambda args: torch.ops.aten._softmax_backward_data(args.dy, args.y, -1, args.y.dtype),
    bucket=lambda args: rows.rows_bucket(args.y),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: SoftmaxArgs) -> None:
    """Raise InputError for what the docstring of `softmax` excludes."""
    rows.check_floating("softmax", x=args.x)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional scale; inner=K for x (M, N, K) and dim=1; hidden=v to set every third element of odd rows
    to v, and all of row 0 if v > -inf.
    """
    shape = (params["M"], params["N"], *((params["inner"],) if "inner" in params else ()))
    x = rows.random_tensor(shape, dtype, device, rows.generator(seed), scale=params.get("scale", 1.0))
    if "hidden" in params:
        hidden = params["hidden"](dtype)
        x[1::2, ::3] = hidden
        if hidden > -torch.inf:
            x[:1] = hidden
    return Sample((x,), {"dim": 1} if "inner" in params else {})


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and writes y.  Backward reads dy and y, writes dx."""
    (x,) = sample.args
    if direction == "fwd":
        return Cost(5 * x.numel(), rows.nbytes(x), rows.nbytes(x))
    return Cost(4 * x.numel(), rows.nbytes(x, x), rows.nbytes(x))


def _ones(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


CONTRACT = register(
    Contract(
        name="softmax",
        family="softmax",
        summary="softmax along one dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: outputs,
            raw_args=lambda grads, saved, args, needs: SoftmaxBackwardArgs(*grads, *saved),
        ),
        workloads=(
            Workload("scores_4k", {"M": 8192, "N": 4096}),
            Workload("vocabulary_32k", {"M": 4096, "N": 32768}),
            Workload("llama3_vocabulary", {"M": 4096, "N": 128256}),
            *(Workload(f"decode_{m}", {"M": m, "N": 128256}, directions=("fwd",)) for m in (1, 8, 64)),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("one_row: a single program", {"M": 1, "N": 256}),
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("n_1: the result is 1", {"M": 5, "N": 1}),
            Workload("few: many rows a program", {"M": 77, "N": 8}),
            Workload("long_row: longer than registers, divided among programs", {"M": 2, "N": 40001}),
            Workload("peaked: few elements take most", {"M": 8, "N": 512, "scale": 3.0}),
            Workload("masked: -inf in some rows", {"M": 6, "N": 300, "hidden": lambda dtype: -torch.inf}),
            Workload(
                "masked_finite: the lowest number as mask, and in all of a row, which is then uniform",
                {"M": 6, "N": 300, "hidden": lambda dtype: torch.finfo(dtype).min},
            ),
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
