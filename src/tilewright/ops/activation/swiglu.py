"""SiLU gate of a gate and an up tensor, forward and backward."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.activation import gated


class SwigluArgs(NamedTuple):
    gate: Tensor  # (..., N)
    up: Tensor  # (..., N)


class SwigluBackwardArgs(NamedTuple):
    dout: Tensor  # (..., N)
    gate: Tensor  # (..., N)
    up: Tensor  # (..., N)


@dispatch("swiglu")
def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """y = silu(gate) * up.

    gate, up: (..., N) bf16|fp16|fp32, one shape and dtype.   Returns (..., N) of that dtype.
    silu(gate) is rounded to gate's dtype before the product, as the models do (Llama, Qwen, Mistral, DeepSeek).

    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "cutile", "cpu", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating and tensors that differ in shape, dtype or device.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return call(CONTRACT, SwigluArgs(gate, up), backend, out)


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.silu_mul(gate, up)


KERNELS = ("triton.gated", "cutile.gated", "cpu.gated")

FORWARD = RawOp(
    "swiglu",
    "fwd",
    SwigluArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.gate.shape, args.gate.dtype),),
    reference=lambda args: reference(args.gate, args.up),
    bucket=lambda args: rows.rows_bucket(args.gate),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "swiglu",
    "bwd",
    SwigluBackwardArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.gate.shape, args.gate.dtype), (args.up.shape, args.up.dtype)),
    reference=lambda args: vjp(reference, (args.gate, args.up), (args.dout,)),
    bucket=lambda args: rows.rows_bucket(args.dout),
    bucket_names=rows.RowsBucket._fields,
    count=2,
)


def check(args: SwigluArgs) -> None:
    """Raise InputError for what the docstring of `swiglu` excludes."""
    gated.check_split("swiglu", args.gate, args.up)


CONTRACT = register(
    Contract(
        name="swiglu",
        family="activation",
        summary="silu(gate) * up of two tensors",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=gated.split_inputs,
        cost=gated.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("gate", "up"),
            save=lambda args, outputs: (args.gate, args.up),
            raw_args=lambda grads, saved, args, needs: SwigluBackwardArgs(*grads, *saved),
        ),
        workloads=gated.SILU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=gated.SPLIT_EDGE_CASES,
        bad_inputs=gated.SPLIT_BAD_INPUTS,
    )
)
