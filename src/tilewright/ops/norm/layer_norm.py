"""LayerNorm, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import level_is_open, vjp
from tilewright.errors import InputError
from tilewright.ops import rows


class LayerNormArgs(NamedTuple):
    x: Tensor  # (..., N)
    weight: Tensor | None  # (N,)
    bias: Tensor | None  # (N,)
    eps: float


class LayerNormBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    x: Tensor  # (..., N)
    weight: Tensor | None  # (N,)
    eps: float
    need_dweight: bool
    need_dbias: bool


@dispatch("layer_norm")
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in float32, rounded once.

    x: (..., N) bf16|fp16|fp32.   weight, bias: (N,) of x's dtype, or None.   Returns (..., N) of x's dtype.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend or raise BackendError.
    Raises InputError for other shapes and dtypes.  Source: Ba, Kiros, Hinton, "Layer Normalization", 2016.
    """
    return call(CONTRACT, LayerNormArgs(x, weight, bias, eps), backend, out)


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Plain torch."""
    if level_is_open() and x.dtype.itemsize == 2:  # torch 2.11 gives such tangents on a GPU in float32
        w_fp32, b_fp32 = (None if t is None else t.float() for t in (weight, bias))
        return F.layer_norm(x.float(), (x.shape[-1],), w_fp32, b_fp32, eps).to(x.dtype)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _backward(args: LayerNormBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    x = args.x
    w = x.new_ones(x.shape[-1]) if args.weight is None else args.weight
    dx, dw, db = vjp(lambda x, w, b: reference(x, w, b, eps=args.eps), (x, w, torch.zeros_like(w)), (args.dy,))
    return dx, dw if args.need_dweight else x.new_empty(0), db if args.need_dbias else x.new_empty(0)


KERNELS = ("triton.layer_norm",)

FORWARD = RawOp(
    "layer_norm",
    "fwd",
    LayerNormArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: reference(args.x, args.weight, args.bias, eps=args.eps),
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "layer_norm",
    "bwd",
    LayerNormBackwardArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.x.shape, args.x.dtype),
        ((args.x.shape[-1] if args.need_dweight else 0,), args.x.dtype),
        ((args.x.shape[-1] if args.need_dbias else 0,), args.x.dtype),
    ),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.dy),
    bucket_names=rows.RowsBucket._fields,
    count=3,
)


def check(args: LayerNormArgs) -> None:
    """Raise InputError for what the docstring of `layer_norm` excludes."""
    x = args.x
    affine = {name: t for name, t in (("weight", args.weight), ("bias", args.bias)) if t is not None}
    rows.check_floating("layer_norm", x=x, **affine)
    rows.check_vector("layer_norm", x, **affine)
    for name, t in affine.items():
        if t.dtype != x.dtype:
            raise InputError(
                f"layer_norm: {name} is {t.dtype}, x is {x.dtype}; they must have one dtype. Cast one of them."
            )


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional affine ("both", "weight", "none"), mean."""
    rng = rows.generator(seed)
    x = rows.random_tensor((params["M"], params["N"]), torch.float32, device, rng) + params.get("mean", 0.0)
    weight, bias = (rows.random_tensor((params["N"],), dtype, device, rng) for _ in range(2))
    affine = params.get("affine", "both")
    return Sample((x.to(dtype), None if affine == "none" else weight, bias if affine == "both" else None))


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x, weight, bias, writes y.  Backward reads dy, x, weight, writes dx, dweight, dbias."""
    x, weight, bias = sample.args
    if direction == "fwd":
        return Cost(6 * x.numel(), rows.nbytes(x, weight, bias), rows.nbytes(x))
    return Cost(14 * x.numel(), rows.nbytes(x, x, weight), rows.nbytes(x, weight, bias))


def _backward_args(grads: Any, saved: Any, args: LayerNormArgs, needs: Any) -> LayerNormBackwardArgs:
    (dy,), (x, weight) = grads, saved
    return LayerNormBackwardArgs(dy, x, weight, args.eps, needs.weight, needs.bias)


def _bad(device: torch.device, weight: tuple[int, ...], dtype: torch.dtype) -> Sample:
    return Sample((torch.ones(4, 8, device=device), torch.ones(weight, device=device, dtype=dtype), None))


CONTRACT = register(
    Contract(
        name="layer_norm",
        family="norm",
        summary="layer normalisation over the last dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "weight", "bias"),
            save=lambda args, outputs: (args.x, args.weight),
            raw_args=_backward_args,
        ),
        workloads=(
            Workload("gpt2_xl", {"M": 8192, "N": 1600}),
            Workload("wide", {"M": 8192, "N": 4096}),
            *(Workload(f"decode_{m}", {"M": m, "N": 4096}, directions=("fwd",)) for m in (1, 64)),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("one_row: a single program", {"M": 1, "N": 256}),
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("long_row: more than one block of a row", {"M": 2, "N": 20000}),
            Workload("mean: large against the deviation", {"M": 5, "N": 512, "mean": 30.0}),
            Workload("no_bias: weight only", {"M": 9, "N": 128, "affine": "weight"}),
            Workload("plain: no weight, no bias", {"M": 9, "N": 128, "affine": "none"}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("weight too short", lambda d: _bad(d, (7,), torch.float32), r"weight is \(7,\); needs \(8,\)"),
            BadInput("weight of another dtype", lambda d: _bad(d, (8,), torch.bfloat16), "must have one dtype"),
        ),
    )
)
