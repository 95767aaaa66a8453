"""The raw ops of `matmul` and `bmm`, forward and backward.

The gradient consists of products by the same op: dA = alpha * dZ @ B^T and dB = alpha * A^T @ dZ, each accumulated in
float32, rounded once, and sent to the backend that is best for its own sizes and layout.  Where a gradient is needed,
an activation is a separate step after the product.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.activation import activated
from tilewright.ops.gemm.dense.args import (
    PLAIN,
    BmmBucket,
    MatmulArgs,
    MatmulBackwardArgs,
    MatmulBackwardBucket,
    MatmulBucket,
    bmm_bucket,
    matmul_bucket,
)
from tilewright.ops.gemm.dense.float8 import LONGEST
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.gemm.operands import FP8, RESULTS, Major, columns_out, copyable, major_a, major_b, unit_stride
from tilewright.ops.rows import accumulate_dtype

PACKAGE = "tilewright.ops.gemm"


def forward_op(op: str, kernels: Sequence[str], *, batched: bool) -> RawOp:
    """`_<op>_fwd`: a (M, K) and b (K, N) of any strides with a unit one; with `batched`, (B, M, K) and (B, K, N)."""
    return RawOp(
        op,
        "fwd",
        MatmulArgs,
        package=PACKAGE,
        kernels=kernels,
        outputs=_outputs,
        reference=product,
        bucket=bmm_bucket if batched else matmul_bucket,
        bucket_names=(BmmBucket if batched else MatmulBucket)._fields,
        batch_fields=("B", "M") if batched else ("M",),
        dtypes=(*RESULTS, FP8),
        out=True,
        reference_writes=True,
        refuses_out=refuses_out,
        direct=_direct,
        torch_first=_torch_first,
    )


def _outputs(args: MatmulArgs) -> tuple[tuple[tuple[int, ...], torch.dtype]]:
    return (((*args.a.shape[:-1], columns_out(args.b.shape[-1], args.activation)), args.out_dtype),)


def refuses_out(out: Tensor, args: object) -> str | None:
    """Returns what `out` lacks to be written, or None: contiguous rows that do not overlap."""
    if out.stride(-1) != 1:
        return "contiguous rows"
    end = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < end:
            return "rows that do not overlap"
        end = max(end, (size - 1) * stride + end)
    return None


def _direct(out: Tensor, args: MatmulArgs) -> bool:
    """Returns whether a kernel can write `out`: kernels of aligned operands write aligned results."""
    return copyable(out) or not matmul_bucket(args).aligned


_FEW_RESULTS, _SHALLOW = 1 << 19, 64  # a tile of 64 x 64 for each multiprocessor of an H200; K
_LONG, _WIDE, _NT = 7168, 28672, 0  # K; N; the layout of the sizes that were measured


def _torch_first(bucket: Any, dtype: torch.dtype, first: str) -> bool:
    """Prefers the vendor's library for unmeasured problems of many rows whose epilogue it fuses.

    Float32 is the library's with any epilogue, though that is more kernels, unless their launches take longer than a
    tile of Triton; an estimate.  Up to 128 rows CUDA C++ takes 0.92 of cuBLAS's time on an H200 where K is long, which
    it splits, or N is wide (fourteen sizes, 0.77 to 1.02).
    """
    if dtype == torch.float32:
        results = getattr(bucket, "B", 1) * bucket.M * bucket.N
        return bucket.epilogue == PLAIN or bucket.K > _SHALLOW or results > _FEW_RESULTS
    single = getattr(bucket, "B", 1) == 1
    if (
        first == "cuda"
        and single
        and bucket.M <= 128
        and bucket.layout == _NT
        and (bucket.K >= _LONG or bucket.N >= _WIDE)
    ):
        return False
    if dtype == FP8:  # cuBLASLt reads rows of a and columns of b, in whole vectors; other operands are copied
        return single and bucket.M > 64 and bucket.layout == _NT and bool(bucket.aligned) and bucket.K <= LONGEST
    return bucket.M > 64 and bucket.epilogue == PLAIN


def gradient_of(forward: RawOp) -> Gradient:
    """Returns the gradient of a raw op of `forward_op`, for a, b, bias and c; alpha has none."""
    return Gradient(
        _backward_op(forward),
        inputs=("a", "b"),
        save=_save,
        raw_args=_raw_args,
        others=_others,
        covers=lambda args: args.activation == "" and args.a.dtype != FP8,
    )


def _backward_op(forward: RawOp) -> RawOp:
    def compose(run: Callable[..., None], outs: Sequence[Tensor], args: MatmulBackwardArgs) -> None:
        factors = []
        if args.need_da:
            factors.append((outs[0], args.dz, args.b.mT))
        if args.need_db:
            assert args.a is not None, "saved if b needs a gradient"
            factors.append((outs[1], args.a.mT, args.dz))
        for out, left, right in factors:
            if out.stride(-1) != 1:  # the operand was transposed: write the transpose of its gradient
                out, left, right = out.mT, right.mT, left.mT
            run(forward, out, *MatmulArgs(left, right, None, None, args.scale, args.alpha, "", out.dtype))

    return RawOp(
        forward.op,
        "bwd",
        MatmulBackwardArgs,
        package=forward.package,
        outputs=_gradients,
        reference=_reference,
        bucket=_backward_bucket,
        bucket_names=MatmulBackwardBucket._fields,
        count=2,
        compose=compose,
    )


def _backward_bucket(args: MatmulBackwardArgs) -> MatmulBackwardBucket:
    return MatmulBackwardBucket(row_bucket(args.dz.shape[-2]), hint(args.b.shape[-1]), hint(args.b.shape[-2]))


def _gradients(args: MatmulBackwardArgs) -> tuple[tuple[Sequence[int], torch.dtype, Sequence[int]], ...]:
    """Returns shapes, dtypes and strides of dA and dB: those of their operands, so that `.grad` needs no copy."""
    b = args.b
    da, db = (*args.dz.shape[:-1], b.shape[-2]), tuple(b.shape)
    a_transposed = args.a is not None and major_a(args.a) is Major.MN
    b_transposed = major_b(b) is Major.K
    empty = ((0,), b.dtype, (1,))
    return (
        (da, b.dtype, _dense(da, a_transposed)) if args.need_da else empty,
        (db, b.dtype, _dense(db, b_transposed)) if args.need_db else empty,
    )


def _dense(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Returns strides of a dense tensor, its last two dimensions swapped in memory if `transposed`."""
    rows, columns = shape[-2:]
    inner = (1, max(rows, 1)) if transposed else (max(columns, 1), 1)
    return (max(rows, 1) * max(columns, 1), *inner)[-len(shape) :]


def _reference(args: MatmulBackwardArgs) -> tuple[Tensor, Tensor]:
    b = args.b
    da, db = b.new_empty(0), b.new_empty(0)
    if args.need_da:
        da = product(MatmulArgs(args.dz, b.mT, None, None, args.scale, args.alpha, "", b.dtype))
    if args.need_db:
        assert args.a is not None, "saved if b needs a gradient"
        db = product(MatmulArgs(args.a.mT, args.dz, None, None, args.scale, args.alpha, "", b.dtype))
    return da, db


def _save(args: MatmulArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Saves b, scale, and a if b needs a gradient: with frozen weights, activations would fill the memory."""
    tensors = (args.a, args.b, args.bias, args.c)
    # The raw op was called directly, outside autograd
    direct_call = not any(t is not None and t.requires_grad for t in tensors)
    return (args.a if args.b.requires_grad or direct_call else None), args.b, args.scale


def _raw_args(grads: tuple[Any, ...], saved: tuple[Any, ...], args: MatmulArgs, needs: Any) -> MatmulBackwardArgs:
    a, b, scale = saved
    # The products run in the operands' dtype, as torch's do: a float32 gradient of bf16 operands is rounded here
    return MatmulBackwardArgs(unit_stride(grads[0].to(b.dtype)), a, b, scale, args.alpha, needs.a, needs.b)


def _others(grads: tuple[Any, ...], saved: tuple[Any, ...], args: MatmulArgs, needs: Any) -> Mapping[str, Tensor]:
    """Returns the gradients of bias, a float32 sum, and of c, that of the result; autograd rounds them."""
    dz: Tensor = grads[0]
    grads_out = {}
    if needs.bias:
        grads_out["bias"] = dz.sum(tuple(range(dz.dim() - 1)), dtype=accumulate_dtype(dz.dtype))
    if needs.c:
        grads_out["c"] = dz
    return grads_out


def wants_activation_gradient(args: MatmulArgs) -> bool:
    """Returns whether a gradient has to pass through the activation of this call."""
    tensors = (args.a, args.b, args.bias, args.c)
    return (
        args.activation != ""
        and torch.is_grad_enabled()
        and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    )


def differentiated(contract: Contract, args: MatmulArgs, backend: str | None) -> Tensor:
    """Runs the product without activation and c, then these as a separate step with a gradient."""
    with torch.no_grad():
        contract.check(*args)  # the call below has neither the activation nor c
    z = call(contract, args._replace(c=None, activation=""), backend)
    return activated(z, args.c, args.activation)
