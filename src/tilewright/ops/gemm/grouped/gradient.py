"""The gradient of `grouped_matmul`, by grouped products: dA[group] = dZ[group] @ B[g]^T, dB[g] = A[group]^T @
dZ[group], each accumulated in float32, rounded once, and sent to the backend that is best for its sizes and layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Gradient, RawOp
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.dense.checks import FP8
from tilewright.ops.gemm.grouped.reference import product_along_k, rows_product
from tilewright.ops.gemm.k_grouped_matmul.raw import FORWARD as ALONG_K
from tilewright.ops.gemm.operands import Major, major_b, unit_stride

_SCHEMA = (
    "Tensor dz, Tensor? a, Tensor b, Tensor? starts, Tensor ends, SymInt expected_rows, bool need_da, bool need_db"
)


def gradient_of(forward: RawOp) -> Gradient:
    """Returns the gradient of a raw op of `forward_op`, for a and b."""
    return Gradient(
        _backward_op(forward),
        inputs=(0, 1),
        save=_save,
        raw_args=_raw_args,
        covers=lambda args: args[7] == "" and args[0].dtype != FP8,
    )


def _backward_op(forward: RawOp) -> RawOp:
    def compose(
        run: Callable[..., None],
        outs: Sequence[Tensor],
        dz: Tensor,
        a: Tensor | None,
        b: Tensor,
        starts: Tensor | None,
        ends: Tensor,
        expected: int,
        need_da: bool,
        need_db: bool,
    ) -> None:
        if need_da:
            da = outs[0]
            da.zero_()  # rows outside of the groups, which the host does not know
            run(forward, da, dz, b.mT, None, None, starts, ends, expected, "", da.dtype)
        if need_db:
            assert a is not None, "saved if b needs a gradient"
            db, left, right = outs[1], a[0].mT, dz[0]
            if db.stride(-1) != 1:  # b was transposed: write the transpose of its gradient
                db, left, right = db.mT, right.mT, left.mT
            run(ALONG_K, db, left, right, None, None, None, ends, db.dtype)

    return RawOp(
        forward.op,
        "bwd",
        _SCHEMA,
        package=forward.package,
        outputs=_gradients,
        reference=_reference,
        bucket=lambda dz, a, b, starts, ends, expected, *_: (
            row_bucket(expected),
            hint(b.shape[-1]),
            hint(b.shape[-2]),
            hint(b.shape[0]),
        ),
        bucket_names=("rows", "N", "K", "G"),
        count=2,
        compose=compose,
    )


def _gradients(
    dz: Tensor,
    a: Tensor | None,
    b: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    expected: int,
    need_da: bool,
    need_db: bool,
) -> tuple[tuple[Sequence[int], torch.dtype, Sequence[int]], ...]:
    """Returns shapes, dtypes and strides: dA row-major, dB with the strides of b, so that `.grad` needs no copy."""
    groups, k, n = b.shape
    rows = dz.shape[1]
    transposed = major_b(b) is Major.K
    empty = ((0,), b.dtype, (1,))
    return (
        ((1, rows, k), b.dtype, (rows * k, k, 1)) if need_da else empty,
        ((groups, k, n), b.dtype, (k * n, 1, k) if transposed else (k * n, n, 1)) if need_db else empty,
    )


def _reference(
    dz: Tensor,
    a: Tensor | None,
    b: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    expected: int,
    need_da: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor]:
    da, db = b.new_empty(0), b.new_empty(0)
    if need_da:
        rows = torch.zeros(1, dz.shape[1], b.shape[1], dtype=b.dtype, device=b.device)
        da = rows_product(dz, b.mT, None, None, starts, ends, expected, "", b.dtype, rows)
    if need_db:
        assert a is not None, "saved if b needs a gradient"
        db = product_along_k(a[0].mT, dz[0], None, None, None, ends, b.dtype)
    return da, db


def _save(args: Sequence[Any], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Saves b, the limits of the groups, and a if b needs a gradient."""
    a, b, starts, ends = args[0], args[1], args[4], args[5]
    direct_call = not (a.requires_grad or b.requires_grad)  # raw op called directly, outside autograd
    return (a if b.requires_grad or direct_call else None), b, starts, ends


def _raw_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    a, b, starts, ends = saved
    # The products run in the operands' dtype, as torch's do: a float32 gradient of bf16 operands is rounded here
    return unit_stride(grads[0].to(b.dtype)), a, b, starts, ends, args[6], needs[0], needs[1]
