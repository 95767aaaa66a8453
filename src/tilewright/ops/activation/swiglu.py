"""SiLU gate of a gate and an up tensor, forward and backward."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.activation import gated


class SwigluArgs(NamedTuple):
    gate: Tensor  # (..., N)
    up: Tensor  # (..., N)
    gate_multiplier: float
    limit: float  # 0: none


class SwigluBackwardArgs(NamedTuple):
    dout: Tensor  # (..., N)
    gate: Tensor  # (..., N)
    up: Tensor  # (..., N)
    gate_multiplier: float
    limit: float  # 0: none


@dispatch("swiglu")
def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    gate_multiplier: float = 1.0,
    limit: float | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = silu(gate) * up.

    gate, up: (..., N) bf16|fp16|fp32, one shape and dtype.   Returns (..., N) of that dtype.
    silu(gate) is rounded to gate's dtype before the product, as the models do (Llama, Qwen, Mistral, DeepSeek).

    gate_multiplier: of gate, their product rounded to its dtype before silu (Falcon-H1).
    limit: gates are clamped to at most limit and ups to -limit .. limit (DeepSeek-V4), after the multiplier; above 0.
    Beyond its limit the gradient of a gate or an up is 0.   With either option only "triton" and "torch" run.

    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "cutile", "cpu", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, tensors that differ in shape, dtype or device, and a limit that is
    not above 0.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return call(CONTRACT, SwigluArgs(gate, up, gate_multiplier, gated.as_limit("swiglu", limit)), backend, out)


def reference(gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, limit: float | None = None) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    if gate_multiplier != 1.0:
        gate = gate * gate_multiplier
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gated.silu_mul(gate, up)


def only_plain(args: "SwigluArgs | SwigluBackwardArgs") -> str | None:
    """Why a kernel of silu(gate) * up alone cannot run: the call has an option.  Else None."""
    return None if args.gate_multiplier == 1.0 and args.limit == 0.0 else "has no gate_multiplier and no limit"


KERNELS = ("triton.gated", "cutile.gated", "cpu.gated")

FORWARD = RawOp(
    "swiglu",
    "fwd",
    SwigluArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.gate.shape, args.gate.dtype),),
    reference=lambda args: reference(args.gate, args.up, gate_multiplier=args.gate_multiplier, limit=args.limit),
    bucket=lambda args: rows.plain_rows_bucket(args.gate, only_plain(args) is None),
    bucket_names=rows.PlainRowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "swiglu",
    "bwd",
    SwigluBackwardArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.gate.shape, args.gate.dtype), (args.up.shape, args.up.dtype)),
    reference=lambda args: vjp(
        lambda gate, up: reference(gate, up, gate_multiplier=args.gate_multiplier, limit=args.limit),
        (args.gate, args.up),
        (args.dout,),
    ),
    bucket=lambda args: rows.plain_rows_bucket(args.dout, only_plain(args) is None),
    bucket_names=rows.PlainRowsBucket._fields,
    count=2,
)


def check(args: SwigluArgs) -> None:
    """Raise InputError for what the docstring of `swiglu` excludes."""
    gated.check_split("swiglu", args.gate, args.up)


def _backward_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: SwigluArgs, needs: SwigluArgs
) -> SwigluBackwardArgs:
    (dout,), (gate, up) = grads, saved
    return SwigluBackwardArgs(dout, gate, up, args.gate_multiplier, args.limit)


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
            raw_args=_backward_args,
        ),
        workloads=gated.SILU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=(
            *gated.SPLIT_EDGE_CASES,
            Workload(
                "multiplier: gate times a number, clamped", {"M": 9, "N": 72, "gate_multiplier": 0.3, "limit": 0.5}
            ),
        ),
        bad_inputs=(*gated.SPLIT_BAD_INPUTS, gated.no_room((4, 8), (4, 8))),
    )
)
