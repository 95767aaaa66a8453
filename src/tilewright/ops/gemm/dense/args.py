"""The raw ops of `matmul` and `bmm`: one schema, one bucket, one gradient; they differ only in the leading dimension.

The gradient consists of products by the same op: dA = alpha * dZ @ B^T and dB = alpha * A^T @ dZ, each accumulated in
float32, rounded once, and sent to the backend that is best for its own sizes and layout.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Gradient, RawOp
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.dense.checks import FP8, RESULTS
from tilewright.ops.gemm.dense.reference import added_inside, product
from tilewright.ops.gemm.operands import (
    Major,
    aligned,
    columns_out,
    copyable,
    layout_code,
    major_a,
    major_b,
    unit_stride,
)
from tilewright.ops.rows import accumulate_dtype

SCHEMA = "Tensor a, Tensor b, Tensor? bias, Tensor? c, Tensor? scale, float alpha, str activation, ScalarType out_dtype"
BUCKET = ("M", "N", "K", "layout", "aligned", "out_bits", "epilogue")


def bucket(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> tuple[int, ...]:
    """Returns what a choice of kernel may depend on, named by `BUCKET`: M in powers of two, exact N and K."""
    n = b.shape[-1]
    return (
        row_bucket(a.shape[-2]),
        hint(n),
        hint(a.shape[-1]),
        layout_code(a, b),
        int(aligned(a, b, columns_out(n, activation), out_dtype)),
        8 * out_dtype.itemsize,
        _epilogue(a, bias, c, scale, activation, out_dtype),
    )


PLAIN, GATED, SEPARATE = range(3)
"""Epilogues in a bucket: what cuBLAS fuses into the product; "swiglu"; what torch computes in separate passes."""


def _epilogue(
    a: Tensor, bias: Tensor | None, c: Tensor | None, scale: Tensor | None, activation: str, out_dtype: torch.dtype
) -> int:
    if activation:
        return GATED if activation == "swiglu" else SEPARATE
    addends = [t for t in (bias, c) if t is not None]
    fused = scale is None and len(addends) < 2 and all(t.dtype == a.dtype == out_dtype for t in addends)
    fused = fused and (out_dtype == torch.float32 or added_inside(a, bias, c))
    return PLAIN if fused else SEPARATE


def refuses_out(out: Tensor, *args: Any) -> str | None:
    """Returns what `out` lacks to be written, or None: contiguous rows that do not overlap."""
    if out.stride(-1) != 1:
        return "contiguous rows"
    end = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < end:
            return "rows that do not overlap"
        end = max(end, (size - 1) * stride + end)
    return None


def _direct(out: Tensor, *args: Any) -> bool:
    """Returns whether a kernel can write `out`: kernels of aligned operands write aligned results."""
    return copyable(out) or not bucket(*args)[4]


def _torch_first(bucket: tuple[int, ...], dtype: torch.dtype, first: str) -> bool:
    """Prefers the vendor's library for unmeasured problems of many rows whose epilogue it fuses."""
    m, epilogue = bucket[-len(BUCKET)], bucket[-1]
    return dtype == torch.float32 or (dtype != FP8 and m > 64 and epilogue == PLAIN)


def forward_op(op: str, package: str, *, batched: bool) -> RawOp:
    """`_<op>_fwd`: a (M, K) and b (K, N) of any strides with a unit one; with `batched`, (B, M, K) and (B, K, N)."""

    def outputs(a: Tensor, b: Tensor, *rest: Any) -> tuple[tuple[tuple[int, ...], torch.dtype]]:
        activation, out_dtype = rest[-2:]
        return (((*a.shape[:-1], columns_out(b.shape[-1], activation)), out_dtype),)

    return RawOp(
        op,
        "fwd",
        SCHEMA,
        package=package,
        outputs=outputs,
        reference=product,
        bucket=(lambda a, *rest: (row_bucket(a.shape[0]), *bucket(a, *rest))) if batched else bucket,
        bucket_names=("B", *BUCKET) if batched else BUCKET,
        batch_fields=(0, 1) if batched else (0,),
        dtypes=(*RESULTS, FP8),
        out=True,
        reference_writes=True,
        refuses_out=refuses_out,
        direct=_direct,
        torch_first=_torch_first,
    )


def gradient_of(forward: RawOp) -> Gradient:
    """Returns the gradient of a raw op of `forward_op`, for a, b, bias and c; alpha has none."""
    return Gradient(
        _backward_op(forward),
        inputs=(0, 1),
        save=_save,
        raw_args=_raw_args,
        others=_others,
        covers=lambda args: args[6] == "" and args[0].dtype != FP8,
    )


def _backward_op(forward: RawOp) -> RawOp:
    def compose(
        run: Callable[..., None],
        outs: Sequence[Tensor],
        dz: Tensor,
        a: Tensor | None,
        b: Tensor,
        scale: Tensor | None,
        alpha: float,
        need_da: bool,
        need_db: bool,
    ) -> None:
        factors = []
        if need_da:
            factors.append((outs[0], dz, b.mT))
        if need_db:
            assert a is not None, "saved if b needs a gradient"
            factors.append((outs[1], a.mT, dz))
        for out, left, right in factors:
            if out.stride(-1) != 1:  # the operand was transposed: write the transpose of its gradient
                out, left, right = out.mT, right.mT, left.mT
            run(forward, out, left, right, None, None, scale, alpha, "", out.dtype)

    return RawOp(
        forward.op,
        "bwd",
        "Tensor dz, Tensor? a, Tensor b, Tensor? scale, float alpha, bool need_da, bool need_db",
        package=forward.package,
        outputs=_gradients,
        reference=_reference,
        bucket=lambda dz, a, b, *_: (row_bucket(dz.shape[-2]), hint(b.shape[-1]), hint(b.shape[-2])),
        bucket_names=("M", "N", "K"),
        count=2,
        compose=compose,
    )


def _gradients(
    dz: Tensor, a: Tensor | None, b: Tensor, scale: Tensor | None, alpha: float, need_da: bool, need_db: bool
) -> tuple[tuple[Sequence[int], torch.dtype, Sequence[int]], ...]:
    """Returns shapes, dtypes and strides of dA and dB: those of their operands, so that `.grad` needs no copy."""
    da, db = (*dz.shape[:-1], b.shape[-2]), tuple(b.shape)
    a_transposed = a is not None and major_a(a) is Major.MN
    b_transposed = major_b(b) is Major.K
    empty = ((0,), b.dtype, (1,))
    return (
        (da, b.dtype, _dense(da, a_transposed)) if need_da else empty,
        (db, b.dtype, _dense(db, b_transposed)) if need_db else empty,
    )


def _dense(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Returns strides of a dense tensor, its last two dimensions swapped in memory if `transposed`."""
    rows, columns = shape[-2:]
    inner = (1, max(rows, 1)) if transposed else (max(columns, 1), 1)
    return (max(rows, 1) * max(columns, 1), *inner)[-len(shape) :]


def _reference(
    dz: Tensor, a: Tensor | None, b: Tensor, scale: Tensor | None, alpha: float, need_da: bool, need_db: bool
) -> tuple[Tensor, Tensor]:
    da, db = b.new_empty(0), b.new_empty(0)
    if need_da:
        da = product(dz, b.mT, None, None, scale, alpha, "", b.dtype)
    if need_db:
        assert a is not None, "saved if b needs a gradient"
        db = product(a.mT, dz, None, None, scale, alpha, "", b.dtype)
    return da, db


def _save(args: Sequence[Any], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Saves b, scale, and a if b needs a gradient: with frozen weights, activations would fill the memory."""
    a, b, scale = args[0], args[1], args[4]
    # The raw op was called directly, outside autograd
    direct_call = not any(t is not None and t.requires_grad for t in args[:4])
    return (a if b.requires_grad or direct_call else None), b, scale


def _raw_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    a, b, scale = saved
    # The products run in the operands' dtype, as torch's do: a float32 gradient of bf16 operands is rounded here
    return unit_stride(grads[0].to(b.dtype)), a, b, scale, args[5], needs[0], needs[1]


def _others(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> Mapping[int, Tensor]:
    """Returns the gradients of bias, a float32 sum, and of c, that of the result; autograd rounds them."""
    dz: Tensor = grads[0]
    grads_out = {}
    if needs[2]:
        grads_out[2] = dz.sum(tuple(range(dz.dim() - 1)), dtype=accumulate_dtype(dz.dtype))
    if needs[3]:
        grads_out[3] = dz
    return grads_out
