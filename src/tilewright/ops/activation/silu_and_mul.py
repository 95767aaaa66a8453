"""SiLU gate with gate and up packed in one tensor.  The contract; backends are the files next to it."""

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops.activation import gated


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
    return call(CONTRACT, (x,), backend, out)


def reference(x: Tensor) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return gated.silu_mul(*gated.halves(x))


def _raw(x: Tensor) -> Tensor:
    return reference(x)


def _raw_backward(dout: Tensor, x: Tensor) -> Tensor:
    return vjp(_raw, (x,), (dout,))[0]


FORWARD = RawOp(
    "silu_and_mul",
    "fwd",
    "Tensor x",
    package=__name__,
    outputs=lambda x: (((*x.shape[:-1], x.shape[-1] // 2), x.dtype),),
    reference=_raw,
    bucket=gated.packed_bucket,
    bucket_names=gated.BUCKET,
    out=True,
)
BACKWARD = RawOp(
    "silu_and_mul",
    "bwd",
    "Tensor dout, Tensor x",
    package=__name__,
    outputs=lambda dout, x: ((x.shape, x.dtype),),
    reference=_raw_backward,
    bucket=gated.split_bucket,
    bucket_names=gated.BUCKET,
)


def check(x: Tensor) -> None:
    """Raises InputError for what the docstring of `silu_and_mul` excludes."""
    gated.check_packed("silu_and_mul", x)


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
            inputs=(0,),
            save=lambda args, outputs: (args[0],),
            raw_args=lambda grads, saved, args, needs: (grads[0], *saved),
        ),
        workloads=gated.SILU_WORKLOADS,
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=gated.EDGE_CASES,
        bad_inputs=gated.PACKED_BAD_INPUTS,
    )
)
