"""Squared ReLU, alone or as a gate, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.activation import gated


class Relu2Args(NamedTuple):
    x: Tensor  # (..., N)
    up: Tensor | None  # (..., N)


class Relu2BackwardArgs(NamedTuple):
    dout: Tensor  # (..., N)
    x: Tensor  # (..., N)
    up: Tensor | None  # (..., N)


@dispatch("relu2")
def relu2(x: Tensor, up: Tensor | None = None, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """y = relu(x)^2, or relu(x)^2 * up with x as the gate.

    x, up: (..., N) bf16|fp16|fp32, one shape and dtype.   Returns (..., N) of that dtype.
    Alone in the MLPs of Primer, Nemotron, Persimmon and Arcee; as a gate in BitNet, which rounds the square
    to x's dtype before the product.

    Gradients of x and up; that of x is 0 where x is not above 0.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating and tensors that differ in shape, dtype or device.
    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.
    """
    return call(CONTRACT, Relu2Args(x, up), backend, out)


def reference(x: Tensor, up: Tensor | None = None) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    square = torch.square(F.relu(x))
    return square if up is None else square * up


def _reference_backward(args: Relu2BackwardArgs) -> tuple[Tensor, ...]:
    if args.up is None:
        return *vjp(reference, (args.x,), (args.dout,)), args.x.new_empty(0)
    return vjp(reference, (args.x, args.up), (args.dout,))


KERNELS = ("triton.relu2",)

FORWARD = RawOp(
    "relu2",
    "fwd",
    Relu2Args,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: reference(args.x, args.up),
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "relu2",
    "bwd",
    Relu2BackwardArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.x.shape, args.x.dtype),
        ((0,) if args.up is None else args.up.shape, args.x.dtype),
    ),
    reference=_reference_backward,
    bucket=lambda args: rows.rows_bucket(args.dout),
    bucket_names=rows.RowsBucket._fields,
    count=2,
)


def check(args: Relu2Args) -> None:
    """Raise InputError for what the docstring of `relu2` excludes."""
    tensors = {"x": args.x} if args.up is None else {"x": args.x, "up": args.up}
    rows.check_floating("relu2", **tensors)
    rows.check_same("relu2", **tensors)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional scale, and gated=True for an up."""
    sample = gated.split_inputs(params, dtype, device, seed)
    return sample if params.get("gated", False) else Sample(sample.args[:1])


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and up, writes one tensor of their size.  Backward reads one more and writes their gradients."""
    both, one = rows.nbytes(*sample.args), rows.nbytes(sample.args[0])
    n = sample.args[0].numel()
    return Cost(3 * n, both, one) if direction == "fwd" else Cost(6 * n, both + one, both)


WORKLOADS = (
    Workload("nemotron4_15b_train", {"M": 8192, "N": 24576}),
    Workload("nemotron_nano_9b_train", {"M": 8192, "N": 15680}),
    Workload("bitnet_2b_train", {"M": 8192, "N": 6912, "gated": True}),
    Workload("decode_8", {"M": 8, "N": 24576}, directions=("fwd",)),
)
EDGE_CASES = (
    Workload("one_row: fewer elements than one block", {"M": 1, "N": 96}),
    Workload("odd_n: rows that start unaligned, a masked tail", {"M": 7, "N": 333}),
    Workload("n_1: one element a row", {"M": 5, "N": 1}),
    Workload("gated: a factor", {"M": 9, "N": 640, "gated": True}),
    Workload("empty: no rows", {"M": 0, "N": 64}),
)


CONTRACT = register(
    Contract(
        name="relu2",
        family="activation",
        summary="relu(x)^2, also as a gate",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "up"),
            save=lambda args, outputs: (args.x, args.up),
            raw_args=lambda grads, saved, args, needs: Relu2BackwardArgs(*grads, *saved),
        ),
        workloads=WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=(
            BadInput(
                "integers", lambda d: Sample((torch.ones(4, 8, device=d, dtype=torch.int32),)), "x is torch.int32"
            ),
            BadInput(
                "up too narrow",
                lambda d: Sample((torch.ones(4, 8, device=d), torch.ones(4, 7, device=d))),
                "up is .* they must have one shape",
            ),
        ),
    )
)
