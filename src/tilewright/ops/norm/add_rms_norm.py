"""Residual add and RMSNorm in one pass: the pair every decoder layer runs twice."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.norm import rms_norm as rms


class AddRmsNormArgs(NamedTuple):
    x: Tensor  # (..., N)
    residual: Tensor  # (..., N)
    weight: Tensor | None  # (N,)
    eps: float
    offset: float
    fp32_weight: bool


class AddRmsNormBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    dtotal: Tensor | None  # (..., N), the gradient of the returned sum; None: it has none
    total: Tensor  # (..., N), the sum
    weight: Tensor | None  # (N,)
    eps: float
    offset: float
    fp32_weight: bool
    need_dweight: bool


@dispatch("add_rms_norm")
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the sum is rounded to its dtype first, as a model without fusion would.

    x, residual: (..., N) bf16|fp16|fp32, one shape and dtype.   weight: (N,) or None.   Returns y, sum: (..., N).
    eps, offset, fp32_weight, dtype of y, backend: as in `rms_norm`.  Neither input is written.
    Raises InputError for different shapes, dtypes or devices of x and residual, a weight that is not (N,), and an
    offset without a weight.
    """
    args = AddRmsNormArgs(x, residual, weight, eps, offset, True if offset != 0.0 else fp32_weight)
    return call(CONTRACT, args, backend)


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    total = x + residual
    return rms.reference(total, weight, eps=eps, offset=offset, fp32_weight=fp32_weight), total


def _forward(args: AddRmsNormArgs) -> tuple[Tensor, Tensor]:
    x, residual, weight, eps, offset, fp32_weight = args
    return reference(x, residual, weight, eps=eps, offset=offset, fp32_weight=fp32_weight)


def _backward(args: AddRmsNormBackwardArgs) -> tuple[Tensor, Tensor]:
    def forward(total: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
        y = rms.reference(total, *weight, eps=args.eps, offset=args.offset, fp32_weight=args.fp32_weight)
        return y, total.clone()

    dx, *dweight = vjp(forward, rms.inputs_of(args.total, args.weight), (args.dy, args.dtotal))
    return dx, dweight[0] if args.need_dweight else dx.new_empty(0, dtype=rms.weight_dtype(args.total, args.weight))


KERNELS = ("triton.fused_rows", "cutile.rms_norm", "cpu.rms_norm")

FORWARD = RawOp(
    "add_rms_norm",
    "fwd",
    AddRmsNormArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.x.shape, rms.out_dtype(args.x, args.weight, args.fp32_weight)),
        (args.x.shape, args.x.dtype),
    ),
    reference=_forward,
    bucket=lambda args: rows.plain_rows_bucket(args.x, rms.is_plain(args.weight)),
    bucket_names=rows.PlainRowsBucket._fields,
    count=2,
)
BACKWARD = RawOp(
    "add_rms_norm",
    "bwd",
    AddRmsNormBackwardArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.total.shape, args.total.dtype),
        ((args.total.shape[-1] if args.need_dweight else 0,), rms.weight_dtype(args.total, args.weight)),
    ),
    reference=_backward,
    bucket=lambda args: rows.plain_rows_bucket(args.dy, rms.is_plain(args.weight)),
    bucket_names=rows.PlainRowsBucket._fields,
    count=2,
)


def check(args: AddRmsNormArgs) -> None:
    """Raise InputError for what the docstring of `add_rms_norm` excludes."""
    rms.check_weight("add_rms_norm", args, x=args.x, residual=args.residual)
    rows.check_same("add_rms_norm", x=args.x, residual=args.residual)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: as in `rms_norm`."""
    sample = rms.inputs(params, dtype, device, seed)
    x, weight = sample.args
    residual = rows.random_tensor(x.shape, dtype, device, rows.generator(seed + 1), params.get("scale", 1.0))
    return Sample((x, residual, weight), sample.kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and residual, writes y and the sum.  Backward reads dy, dsum and the sum, writes one gradient,
    which x and residual share.
    """
    x, _, weight = sample.args
    if direction == "fwd":
        return Cost(5 * x.numel(), rows.nbytes(x, x, weight), rows.nbytes(x, x))
    return Cost(11 * x.numel(), rows.nbytes(x, x, x, weight), rows.nbytes(x, weight))


def _backward_args(grads: Any, saved: Any, args: AddRmsNormArgs, needs: Any) -> AddRmsNormBackwardArgs:
    total, weight = saved
    dy, dtotal = grads
    dy = torch.zeros_like(total) if dy is None else dy
    return AddRmsNormBackwardArgs(dy, dtotal, total, weight, args.eps, args.offset, args.fp32_weight, needs.weight)


def _expand(outputs: Any) -> tuple[Tensor, ...]:
    """x and residual share one gradient."""
    dx, dweight = outputs
    return dx, dx, dweight


def _save(args: AddRmsNormArgs, outputs: Any) -> tuple[Tensor, Tensor | None]:
    _, total = outputs
    return total, args.weight


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
            inputs=("x", "residual", "weight"),
            save=_save,
            raw_args=_backward_args,
            expand=_expand,
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
            Workload("plain: no weight", {"M": 9, "N": 128, "weight_dtype": None}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("shapes differ", lambda d: _bad(d, torch.float32, (4, 9)), "must have one shape and dtype"),
            BadInput("broadcast refused", lambda d: _bad(d, torch.float32, (1, 8)), "must have one shape and dtype"),
            BadInput("dtypes differ", lambda d: _bad(d, torch.bfloat16, (4, 8)), "must have one shape and dtype"),
        ),
    )
)
