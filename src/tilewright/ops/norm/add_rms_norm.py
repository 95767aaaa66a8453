"""Residual add and RMSNorm in one pass: the pair every decoder layer runs twice.  The contract; backends are the files
next to it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.norm import rms_norm as rms


@dispatch("add_rms_norm")
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the sum is rounded to its dtype first, as a model without fusion would.

    x, residual: (..., N) bf16|fp16|fp32, one shape and dtype.   weight: (N,).   Returns y (..., N), sum (..., N).
    eps, offset, fp32_weight, dtype of y, backend: as in `rms_norm`.  Neither input is written.
    Raises InputError for different shapes, dtypes or devices of x and residual, or a weight that is not (N,).
    """
    return call(CONTRACT, (x, residual, weight, eps, offset, True if offset != 0.0 else fp32_weight), backend)


def reference(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0, fp32_weight: bool = False
) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    total = x + residual
    return rms.reference(total, weight, eps=eps, offset=offset, fp32_weight=fp32_weight), total


def _raw(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, fp32_weight: bool
) -> tuple[Tensor, Tensor]:
    return reference(x, residual, weight, eps=eps, offset=offset, fp32_weight=fp32_weight)


def _raw_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    def forward(total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms.reference(total, weight, eps=eps, offset=offset, fp32_weight=fp32_weight), total.clone()

    dx, dweight = vjp(forward, (total, weight), (dy, dtotal))
    return dx, dweight if need_dweight else dweight.new_empty(0)


_OPTIONS = "float eps, float offset, bool fp32_weight"
FORWARD = RawOp(
    "add_rms_norm",
    "fwd",
    f"Tensor x, Tensor residual, Tensor weight, {_OPTIONS}",
    package=__name__,
    outputs=lambda x, residual, weight, eps, offset, fp32_weight: (
        (x.shape, rms.out_dtype(x, weight, fp32_weight)),
        (x.shape, x.dtype),
    ),
    reference=_raw,
    bucket=lambda x, *_: rows.rows_bucket(x),
    bucket_names=rows.ROW_BUCKET,
    count=2,
)
BACKWARD = RawOp(
    "add_rms_norm",
    "bwd",
    f"Tensor dy, Tensor? dtotal, Tensor total, Tensor weight, {_OPTIONS}, bool need_dweight",
    package=__name__,
    outputs=lambda dy, dtotal, total, weight, eps, offset, fp32_weight, need_dweight: (
        (total.shape, total.dtype),
        (weight.shape if need_dweight else (0,), weight.dtype),
    ),
    reference=_raw_backward,
    bucket=lambda dy, *_: rows.rows_bucket(dy),
    bucket_names=rows.ROW_BUCKET,
    count=2,
)


def check(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, fp32_weight: bool) -> None:
    """Raises InputError for what the docstring of `add_rms_norm` excludes."""
    rows.check_floating("add_rms_norm", x=x, residual=residual, weight=weight)
    rows.check_same("add_rms_norm", x=x, residual=residual)
    rows.check_vector("add_rms_norm", x, weight=weight)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: as in `rms_norm`."""
    sample = rms.inputs(params, dtype, device, seed)
    residual = rows.random_tensor(
        sample.args[0].shape, dtype, device, rows.generator(seed + 1), params.get("scale", 1.0)
    )
    return Sample((sample.args[0], residual, sample.args[1]), sample.kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and residual, writes y and the sum.  Backward reads dy, dsum and the sum, writes one gradient,
    which x and residual share.
    """
    x, _, weight = sample.args
    if direction == "fwd":
        return Cost(5 * x.numel(), rows.nbytes(x, x, weight), rows.nbytes(x, x))
    return Cost(11 * x.numel(), rows.nbytes(x, x, x, weight), rows.nbytes(x, weight))


def _backward_args(grads: Any, saved: Any, args: Any, needs: Any) -> tuple[Any, ...]:
    total, weight = saved
    dy, dtotal = grads
    return (torch.zeros_like(total) if dy is None else dy, dtotal, total, weight, *args[3:], needs[2])


def _bad(device: torch.device, x: torch.dtype, residual_shape: tuple[int, ...]) -> Sample:
    residual = torch.ones(residual_shape, device=device)
    return Sample((torch.ones(4, 8, dtype=x, device=device), residual, torch.ones(8, device=device)))


CONTRACT = register(
    Contract(
        name="add_rms_norm",
        family="norm",
        summary="residual add, then RMS normalisation; returns both",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=(0, 1, 2),
            save=lambda args, outputs: (outputs[1], args[2]),
            raw_args=_backward_args,
            expand=lambda grads: (grads[0], grads[0], grads[1]),
        ),
        workloads=(
            Workload("llama8b_train", {"M": 8192, "N": 4096}),
            Workload("llama8b_long", {"M": 32768, "N": 4096}),
            *(Workload(f"decode_{m}", {"M": m, "N": 4096}, directions=("fwd",)) for m in (1, 4, 16, 64)),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("one_row: a single program", {"M": 1, "N": 256}),
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("long_row: more than one block of a row", {"M": 2, "N": 20000}),
            Workload("gemma: offset 1 in float32", {"M": 33, "N": 512, "offset": 1.0}),
            Workload("olmo2: weight in float32, one rounding", {"M": 33, "N": 512, "fp32_weight": True}),
            Workload("mixed: float32 weight promotes the result", {"M": 9, "N": 128, "weight_dtype": torch.float32}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("shapes differ", lambda d: _bad(d, torch.float32, (4, 9)), "must have one shape and dtype"),
            BadInput("broadcast refused", lambda d: _bad(d, torch.float32, (1, 8)), "must have one shape and dtype"),
            BadInput("dtypes differ", lambda d: _bad(d, torch.bfloat16, (4, 8)), "must have one shape and dtype"),
        ),
    )
)
