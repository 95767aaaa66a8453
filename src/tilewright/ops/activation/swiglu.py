"""SiLU gate of a gate and an up tensor.  The contract; backends are the files next to it."""

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops.activation import gated


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
    return call(CONTRACT, (gate, up), backend, out)


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.silu_mul(gate, up)


def _raw(gate: Tensor, up: Tensor) -> Tensor:
    return reference(gate, up)


def _raw_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = vjp(_raw, (gate, up), (dout,))
    return dgate, dup


FORWARD = RawOp(
    "swiglu",
    "fwd",
    "Tensor gate, Tensor up",
    package=__name__,
    outputs=lambda gate, up: ((gate.shape, gate.dtype),),
    reference=_raw,
    bucket=gated.split_bucket,
    bucket_names=gated.BUCKET,
    out=True,
)
BACKWARD = RawOp(
    "swiglu",
    "bwd",
    "Tensor dout, Tensor gate, Tensor up",
    package=__name__,
    outputs=lambda dout, gate, up: ((gate.shape, gate.dtype), (up.shape, up.dtype)),
    reference=_raw_backward,
    bucket=gated.split_bucket,
    bucket_names=gated.BUCKET,
    count=2,
)


def check(gate: Tensor, up: Tensor) -> None:
    """Raises InputError for what the docstring of `swiglu` excludes."""
    gated.check_split("swiglu", gate, up)


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
            inputs=(0, 1),
            save=lambda args, outputs: (args[0], args[1]),
            raw_args=lambda grads, saved, args, needs: (grads[0], *saved),
        ),
        workloads=gated.SILU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=gated.SPLIT_EDGE_CASES,
        bad_inputs=gated.SPLIT_BAD_INPUTS,
    )
)
