"""GELU gate of a gate and an up tensor.  The contract; backends are the files next to it."""

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops.activation import gated


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
    return call(CONTRACT, (gate, up, approximate), backend, out)


def reference(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.gelu_mul(gate, up, approximate)


def _raw(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return reference(gate, up, approximate=approximate)


def _raw_backward(dout: Tensor, gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    dgate, dup = vjp(lambda gate, up: _raw(gate, up, approximate), (gate, up), (dout,))
    return dgate, dup


FORWARD = RawOp(
    "geglu",
    "fwd",
    "Tensor gate, Tensor up, str approximate",
    package=__name__,
    outputs=lambda gate, up, approximate: ((gate.shape, gate.dtype),),
    reference=_raw,
    bucket=gated.split_bucket,
    bucket_names=gated.BUCKET,
    out=True,
)
BACKWARD = RawOp(
    "geglu",
    "bwd",
    "Tensor dout, Tensor gate, Tensor up, str approximate",
    package=__name__,
    outputs=lambda dout, gate, up, approximate: ((gate.shape, gate.dtype), (up.shape, up.dtype)),
    reference=_raw_backward,
    bucket=gated.split_bucket,
    bucket_names=gated.BUCKET,
    count=2,
)


def check(gate: Tensor, up: Tensor, approximate: str) -> None:
    """Raises InputError for what the docstring of `geglu` excludes."""
    gated.check_split("geglu", gate, up)
    gated.check_approximate("geglu", approximate)


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
            inputs=(0, 1),
            save=lambda args, outputs: (args[0], args[1]),
            raw_args=lambda grads, saved, args, needs: (grads[0], *saved, args[2]),
        ),
        workloads=gated.GELU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=(*gated.SPLIT_EDGE_CASES, *gated.GELU_EDGE_CASES),
        bad_inputs=(*gated.SPLIT_BAD_INPUTS, gated.bad_approximate((4, 8), (4, 8))),
    )
)
