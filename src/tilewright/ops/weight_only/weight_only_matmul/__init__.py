"""Activations of 16 bits times weights of 8 or 4.  The contract; backends are in the other files of this folder."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops.gemm.dense.checks import check_epilogue
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out, copyable, fold, folded_out
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.checks import check_dtype, check_weight
from tilewright.ops.weight_only.weight_only_matmul import samples


@dispatch("weight_only_matmul")
def weight_only_matmul(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = act(x @ w.T + bias) with w = q * scales (W8A16, W4A16).  Made for at most 64 rows, right for any number.

    x: (..., M, K) bf16|fp16; fp32 runs in torch alone.   q: (N, K) int8, or (N, K / 2) uint8 of 4 bits, and
    scales: (N, ceil(K / 128)) bf16|fp16|fp32, as `quantize_weight` makes them.   Returns (..., M, N_out).
    bias: (N,) bf16|fp16|fp32.   activation: None, "relu", "gelu" (by tanh), "silu", or "swiglu", for which rows of the
    weight are pairs (gate_0, up_0, gate_1, up_1, ...) and N_out = N / 2.   out_dtype: bf16|fp16|fp32, by default x's.

    Rounding: an integer is exact in x's dtype, and its product with x in float32.  The products of a group of 128 are
    added in float32, their sum is multiplied by the group's scale and added to those of the other groups, in float32;
    then bias and activation, and one rounding to out_dtype.  Weights themselves are never rounded.

    out: contiguous tensor to write instead of allocating.   backend: run on exactly this backend ("cuda", "triton",
    "torch") or raise BackendError.   "cuda" is for Hopper and scales as `quantize_weight` lays them.
    For inference: no backend has a kernel of a gradient.  Where x or bias needs one the reference runs, which makes the
    weight in float32.   Raises InputError for shapes that do not fit and every option outside of the above.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise InputError(f"weight_only_matmul: x is {_told(x)}; needs a tensor (..., M, K).")
    rows = x.shape[:-1]
    args = arguments(fold("weight_only_matmul", "x", x, rows), q, scales, bias, activation, out_dtype)
    if out is not None:
        if x.dim() > 2:  # what is wrong with the operands comes before what is wrong with folding `out`
            with torch.no_grad():
                CONTRACT.check(*args)
            call(CONTRACT, args, backend, folded_out("weight_only_matmul", out, rows))
            return out
        result: Tensor = call(CONTRACT, args, backend, out)
        return result
    result = call(CONTRACT, args, backend)
    return result if x.dim() == 2 else result.view(*rows, result.shape[-1])


def arguments(
    x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, activation: str | None, out_dtype: torch.dtype | None
) -> tuple[Any, ...]:
    """Returns the arguments of the raw op: rows of x and q contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    q = q.contiguous() if isinstance(q, Tensor) else q
    bias = bias.contiguous() if isinstance(bias, Tensor) else bias
    return x, q, scales, bias, activation or "", out_dtype or x.dtype


def reference(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    result = product(x.flatten(0, -2), q, scales, bias, activation or "", out_dtype or x.dtype)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def product(
    x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype
) -> Tensor:
    """Returns act(x @ w.T + bias) of rows x (M, K), with weight and accumulation in float32."""
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(acc_dtype) @ packing.restore(q, scales).to(acc_dtype).T
    return apply_epilogue(z, bias, None, activation, torch.float64 if acc_dtype == torch.float64 else out_dtype)


def bucket(
    x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype
) -> tuple[int, ...]:
    """aligned: TMA can read x, q and the scales in place.  gated: halves the columns."""
    aligned = copyable(x) and copyable(q) and copyable(scales) and packing.in_layout(scales)
    return (
        row_bucket(x.shape[0]),
        hint(q.shape[0]),
        hint(x.shape[1]),
        packing.bits_of(q),
        int(aligned),
        8 * out_dtype.itemsize,
        int(activation == "swiglu"),
    )


FORWARD = RawOp(
    "weight_only_matmul",
    "fwd",
    "Tensor x, Tensor q, Tensor scales, Tensor? bias, str activation, ScalarType out_dtype",
    package=__name__,
    outputs=lambda x, q, scales, bias, activation, out_dtype: (
        ((x.shape[0], columns_out(q.shape[0], activation)), out_dtype),
    ),
    reference=product,
    bucket=bucket,
    bucket_names=("M", "N", "K", "bits", "aligned", "out_bits", "gated"),
    dtypes=(torch.bfloat16, torch.float16),
    out=True,
)


def check(x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype) -> None:
    """Raises InputError for what the docstring of `weight_only_matmul` excludes."""
    op = "weight_only_matmul"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64) or x.dim() != 2:
        raise InputError(f"{op}: x is {_told(x)}; needs (M, K) of bfloat16 or float16 (float32 runs in torch alone).")
    check_weight(op, q, scales)
    depth = packing.depth_of(q)
    if x.shape[1] != depth:
        raise InputError(
            f"{op}: x is {tuple(x.shape)}, q {tuple(q.shape)} holds K={depth} elements of {packing.bits_of(q)} bits a "
            "row; they must agree in K."
        )
    if x.device != q.device:
        raise InputError(f"{op}: x is on {x.device}, q on {q.device}. Move them to one device.")
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{op}: activation is {activation!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS[1:]))}."
        )
    if x.dtype != torch.float64:
        check_dtype(op, "out_dtype", out_dtype)
    check_epilogue(op, (x.shape[0], q.shape[0]), x, bias, None, activation)


def _told(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


CONTRACT = register(
    Contract(
        name="weight_only_matmul",
        family="weight_only",
        summary="few rows of 16 bits times weights of 8 or 4",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        dtypes=(torch.bfloat16, torch.float16),
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
    )
)
