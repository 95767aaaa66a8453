"""LayerNorm, forward and backward.  The contract; backends are the files next to it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows


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
    return call(CONTRACT, (x, weight, bias, eps), backend, out)


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Plain torch."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _raw(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return reference(x, weight, bias, eps=eps)


def _raw_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, need_dweight: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[-1]
    w = x.new_ones(n) if weight is None else weight
    dx, dw, db = vjp(lambda x, w, b: _raw(x, w, b, eps), (x, w, torch.zeros_like(w)), (dy,))
    return dx, dw if need_dweight else x.new_empty(0), db if need_dbias else x.new_empty(0)


FORWARD = RawOp(
    "layer_norm",
    "fwd",
    "Tensor x, Tensor? weight, Tensor? bias, float eps",
    package=__name__,
    outputs=lambda x, *_: ((x.shape, x.dtype),),
    reference=_raw,
    bucket=lambda x, *_: rows.rows_bucket(x),
    bucket_names=rows.ROW_BUCKET,
    out=True,
)
BACKWARD = RawOp(
    "layer_norm",
    "bwd",
    "Tensor dy, Tensor x, Tensor? weight, float eps, bool need_dweight, bool need_dbias",
    package=__name__,
    outputs=lambda dy, x, weight, eps, need_dweight, need_dbias: (
        (x.shape, x.dtype),
        ((x.shape[-1] if need_dweight else 0,), x.dtype),
        ((x.shape[-1] if need_dbias else 0,), x.dtype),
    ),
    reference=_raw_backward,
    bucket=lambda dy, *_: rows.rows_bucket(dy),
    bucket_names=rows.ROW_BUCKET,
    count=3,
)


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """Raises InputError for what the docstring of `layer_norm` excludes."""
    tensors = {name: t for name, t in (("x", x), ("weight", weight), ("bias", bias)) if t is not None}
    rows.check_floating("layer_norm", **tensors)
    rows.check_vector("layer_norm", x, weight=weight, bias=bias)
    for name, t in tensors.items():
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
            inputs=(0, 1, 2),
            save=lambda args, outputs: (args[0], args[1]),
            raw_args=lambda grads, saved, args, needs: (grads[0], *saved, args[3], needs[1], needs[2]),
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
