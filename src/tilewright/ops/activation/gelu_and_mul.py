"""GELU gate with gate and up packed in one tensor.  The contract; backends are the files next to it."""

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops.activation import gated


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
    return call(CONTRACT, (x, approximate), backend, out)


def reference(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.gelu_mul(*gated.halves(x), approximate)


def _raw(x: Tensor, approximate: str) -> Tensor:
    return reference(x, approximate=approximate)


def _raw_backward(dout: Tensor, x: Tensor, approximate: str) -> Tensor:
    return vjp(lambda x: _raw(x, approximate), (x,), (dout,))[0]


FORWARD = RawOp(
    "gelu_and_mul",
    "fwd",
    "Tensor x, str approximate",
    package=__name__,
    outputs=lambda x, approximate: (((*x.shape[:-1], x.shape[-1] // 2), x.dtype),),
    reference=_raw,
    bucket=gated.packed_bucket,
    bucket_names=gated.BUCKET,
    out=True,
)
BACKWARD = RawOp(
    "gelu_and_mul",
    "bwd",
    "Tensor dout, Tensor x, str approximate",
    package=__name__,
    outputs=lambda dout, x, approximate: ((x.shape, x.dtype),),
    reference=_raw_backward,
    bucket=gated.split_bucket,
    bucket_names=gated.BUCKET,
)


def check(x: Tensor, approximate: str) -> None:
    """Raises InputError for what the docstring of `gelu_and_mul` excludes."""
    gated.check_packed("gelu_and_mul", x)
    gated.check_approximate("gelu_and_mul", approximate)


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
            inputs=(0,),
            save=lambda args, outputs: (args[0],),
            raw_args=lambda grads, saved, args, needs: (grads[0], *saved, args[1]),
        ),
        workloads=gated.GELU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=(*gated.EDGE_CASES, *gated.GELU_EDGE_CASES),
        bad_inputs=(*gated.PACKED_BAD_INPUTS, gated.bad_approximate((4, 8))),
    )
)
