"""GELU gate of a gate and an up tensor, forward and backward."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.activation import gated


class GegluArgs(NamedTuple):
    gate: Tensor  # (..., N)
    up: Tensor  # (..., N)
    approximate: str


class GegluBackwardArgs(NamedTuple):
    dout: Tensor  # (..., N)
    gate: Tensor  # (..., N)
    up: Tensor  # (..., N)
    approximate: str


@dispatch("geglu")
def geglu(
    gate: Tensor, up: Tensor, *, approximate: str = "tanh", out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """y = gelu(gate) * up.

    gate, up: (..., N) bf16|fp16|fp32, one shape and dtype.   Returns (..., N) of that dtype.
    gelu(gate) is rounded to gate's dtype before the product, as the models do (Gemma).

    approximate: "tanh", the form of Gemma and most others, or "none", GELU by the error function.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, another approximate, tensors of different shape,
    dtype or device.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return call(CONTRACT, GegluArgs(gate, up, approximate), backend, out)


def reference(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.gelu_mul(gate, up, approximate)


KERNELS = ("triton.gated",)

FORWARD = RawOp(
    "geglu",
    "fwd",
    GegluArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.gate.shape, args.gate.dtype),),
    reference=lambda args: reference(args.gate, args.up, approximate=args.approximate),
    bucket=lambda args: rows.rows_bucket(args.gate),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "geglu",
    "bwd",
    GegluBackwardArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.gate.shape, args.gate.dtype), (args.up.shape, args.up.dtype)),
    reference=lambda args: vjp(
        lambda gate, up: reference(gate, up, approximate=args.approximate), (args.gate, args.up), (args.dout,)
    ),
    bucket=lambda args: rows.rows_bucket(args.dout),
    bucket_names=rows.RowsBucket._fields,
    count=2,
)


def check(args: GegluArgs) -> None:
    """Raise InputError for what the docstring of `geglu` excludes."""
    gated.check_split("geglu", args.gate, args.up)
    gated.check_approximate("geglu", args.approximate)


def _backward_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: GegluArgs, needs: GegluArgs
) -> GegluBackwardArgs:
    (dout,), (gate, up) = grads, saved
    return GegluBackwardArgs(dout, gate, up, args.approximate)


CONTRACT = register(
    Contract(
        name="geglu",
        family="activation",
        summary="gelu(gate) * up of two tensors",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=gated.split_inputs,
        cost=gated.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("gate", "up"),
            save=lambda args, outputs: (args.gate, args.up),
            raw_args=_backward_args,
        ),
        workloads=gated.GELU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=(*gated.SPLIT_EDGE_CASES, *gated.GELU_EDGE_CASES),
        bad_inputs=(*gated.SPLIT_BAD_INPUTS, gated.bad_approximate((4, 8), (4, 8))),
    )
)
