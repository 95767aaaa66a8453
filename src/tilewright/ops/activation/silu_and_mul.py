"""SiLU gate with gate and up packed in one tensor, forward and backward."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.activation import gated


class SiluAndMulArgs(NamedTuple):
    x: Tensor  # (..., 2N)


class SiluAndMulBackwardArgs(NamedTuple):
    dout: Tensor  # (..., N)
    x: Tensor  # (..., 2N)


@dispatch("silu_and_mul")
def silu_and_mul(x: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """y = silu(gate) * up, where gate is the first half of x's last dimension and up the second.

    x: (..., 2N) bf16|fp16|fp32.   Returns (..., N) of x's dtype.
    silu(gate) is rounded to x's dtype before the product, as the models do (Phi-3).

    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "cutile", "cpu", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating and an odd last dimension.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return call(CONTRACT, SiluAndMulArgs(x), backend, out)


def reference(x: Tensor) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.silu_mul(*gated.halves(x))


KERNELS = ("triton.gated", "cutile.gated", "cpu.gated")

FORWARD = RawOp(
    "silu_and_mul",
    "fwd",
    SiluAndMulArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((gated.packed_shape(args.x), args.x.dtype),),
    reference=lambda args: reference(args.x),
    bucket=lambda args: gated.packed_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "silu_and_mul",
    "bwd",
    SiluAndMulBackwardArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: vjp(reference, (args.x,), (args.dout,))[0],
    bucket=lambda args: rows.rows_bucket(args.dout),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: SiluAndMulArgs) -> None:
    """Raise InputError for what the docstring of `silu_and_mul` excludes."""
    gated.check_packed("silu_and_mul", args.x)


CONTRACT = register(
    Contract(
        name="silu_and_mul",
        family="activation",
        summary="silu(gate) * up, packed (gate, up) in the last dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=gated.packed_inputs,
        cost=gated.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: (args.x,),
            raw_args=lambda grads, saved, args, needs: SiluAndMulBackwardArgs(*grads, *saved),
        ),
        workloads=gated.SILU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=gated.EDGE_CASES,
        bad_inputs=gated.PACKED_BAD_INPUTS,
    )
)
