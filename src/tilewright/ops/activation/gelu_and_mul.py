"""GELU gate with gate and up packed in one tensor, forward and backward."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.activation import gated


class GeluAndMulArgs(NamedTuple):
    x: Tensor  # (..., 2N)
    approximate: str


class GeluAndMulBackwardArgs(NamedTuple):
    dout: Tensor  # (..., N)
    x: Tensor  # (..., 2N)
    approximate: str


@dispatch("gelu_and_mul")
def gelu_and_mul(
    x: Tensor, *, approximate: str = "tanh", out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """y = gelu(gate) * up, where gate is the first half of x's last dimension and up the second.

    x: (..., 2N) bf16|fp16|fp32.   Returns (..., N) of x's dtype.
    gelu(gate) is rounded to x's dtype before the product, as the models do (Gemma).

    approximate: "tanh", the form of Gemma and most others, or "none", GELU by the error function.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "cpu", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, another approximate and an odd last dimension.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return call(CONTRACT, GeluAndMulArgs(x, approximate), backend, out)


def reference(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.gelu_mul(*gated.halves(x), approximate)


KERNELS = ("triton.gated", "cpu.gated")

FORWARD = RawOp(
    "gelu_and_mul",
    "fwd",
    GeluAndMulArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((gated.packed_shape(args.x), args.x.dtype),),
    reference=lambda args: reference(args.x, approximate=args.approximate),
    bucket=lambda args: gated.packed_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "gelu_and_mul",
    "bwd",
    GeluAndMulBackwardArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: vjp(lambda x: reference(x, approximate=args.approximate), (args.x,), (args.dout,))[0],
    bucket=lambda args: rows.rows_bucket(args.dout),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: GeluAndMulArgs) -> None:
    """Raise InputError for what the docstring of `gelu_and_mul` excludes."""
    gated.check_packed("gelu_and_mul", args.x)
    gated.check_approximate("gelu_and_mul", args.approximate)


def _backward_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: GeluAndMulArgs, needs: GeluAndMulArgs
) -> GeluAndMulBackwardArgs:
    (dout,), (x,) = grads, saved
    return GeluAndMulBackwardArgs(dout, x, args.approximate)


CONTRACT = register(
    Contract(
        name="gelu_and_mul",
        family="activation",
        summary="gelu(gate) * up, packed (gate, up) in the last dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=gated.packed_inputs,
        cost=gated.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: (args.x,),
            raw_args=_backward_args,
        ),
        workloads=gated.GELU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=(*gated.EDGE_CASES, *gated.GELU_EDGE_CASES),
        bad_inputs=(*gated.PACKED_BAD_INPUTS, gated.bad_approximate((4, 8))),
    )
)
