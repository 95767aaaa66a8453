"""gpt-oss' clamped SwiGLU with gate and up packed in one tensor, forward and backward."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.activation import gated


class SwigluoaiAndMulArgs(NamedTuple):
    x: Tensor  # (..., 2N)
    alpha: float
    limit: float
    interleaved: bool


class SwigluoaiAndMulBackwardArgs(NamedTuple):
    dout: Tensor  # (..., N)
    x: Tensor  # (..., 2N)
    alpha: float
    limit: float
    interleaved: bool


@dispatch("swigluoai_and_mul")
def swigluoai_and_mul(
    x: Tensor,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = (up + 1) * gate * sigmoid(alpha * gate), of gates clamped to at most limit and ups to -limit .. limit.

    x: (..., 2N) bf16|fp16|fp32.   Returns (..., N) of x's dtype.
    interleaved: gates are elements 2i of x's last dimension and ups 2i + 1 (gpt-oss); if False, gates are its first
    half and ups the second (MiniMax-M3).
    limit: above 0; inf clamps nothing.
    Computed in float32 and rounded once; the models round every step.

    Gradient: of x.  Beyond its limit that of a gate or an up is 0.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, an odd last dimension and a limit that is not above 0.
    Source: GptOssExperts in transformers; the name is vLLM's.
    """
    return call(CONTRACT, SwigluoaiAndMulArgs(x, alpha, limit, interleaved), backend, out)


def reference(x: Tensor, *, alpha: float = 1.702, limit: float = 7.0, interleaved: bool = True) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else gated.halves(x)
    return gated.swigluoai(gate, up, alpha, limit)


KERNELS = ("triton.swigluoai",)

FORWARD = RawOp(
    "swigluoai_and_mul",
    "fwd",
    SwigluoaiAndMulArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((gated.packed_shape(args.x), args.x.dtype),),
    reference=lambda args: reference(args.x, alpha=args.alpha, limit=args.limit, interleaved=args.interleaved),
    bucket=lambda args: gated.packed_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "swigluoai_and_mul",
    "bwd",
    SwigluoaiAndMulBackwardArgs,
    package="tilewright.ops.activation",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: vjp(
        lambda x: reference(x, alpha=args.alpha, limit=args.limit, interleaved=args.interleaved),
        (args.x,),
        (args.dout,),
    )[0],
    bucket=lambda args: rows.rows_bucket(args.dout),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: SwigluoaiAndMulArgs) -> None:
    """Raise InputError for what the docstring of `swigluoai_and_mul` excludes."""
    gated.check_packed("swigluoai_and_mul", args.x)
    gated.check_limit("swigluoai_and_mul", args.limit)


def _backward_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: SwigluoaiAndMulArgs, needs: SwigluoaiAndMulArgs
) -> SwigluoaiAndMulBackwardArgs:
    return SwigluoaiAndMulBackwardArgs(grads[0], saved[0], args.alpha, args.limit, args.interleaved)


CONTRACT = register(
    Contract(
        name="swigluoai_and_mul",
        family="activation",
        summary="gpt-oss' clamped SwiGLU, packed in the last dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=gated.packed_inputs,
        cost=gated.cost,
        gradient=Gradient(BACKWARD, inputs=("x",), save=lambda args, outputs: (args.x,), raw_args=_backward_args),
        workloads=(
            Workload("gpt_oss_train", {"M": 8192, "N": 2880}),
            Workload("minimax_m3_train", {"M": 8192, "N": 12288, "interleaved": False}),
            Workload("decode_8", {"M": 8, "N": 2880}, directions=("fwd",)),
        ),
        cpu_workloads=gated.CPU_WORKLOADS,
        edge_cases=(
            Workload("odd_n: rows that start unaligned, a masked tail", {"M": 7, "N": 333}),
            Workload("n_1: a pair a row", {"M": 5, "N": 1}),
            Workload("halves: gates before ups", {"M": 9, "N": 640, "interleaved": False}),
            Workload("clamped: most gates and ups beyond the limit", {"M": 6, "N": 96, "scale": 30.0}),
            Workload("no_clamp: an infinite limit", {"M": 6, "N": 96, "limit": float("inf"), "alpha": 1.0}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(*gated.PACKED_BAD_INPUTS, gated.no_room((4, 8))),
    )
)
