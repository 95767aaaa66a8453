"""The product in plain torch: the oracle in float64; on a GPU it runs cuBLAS, which `auto` may choose."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.derivatives import Function, level_is_open
from tilewright.hardware.autocast import AUTOCASTS
from tilewright.ops.gemm.dense import float8
from tilewright.ops.gemm.dense.args import MatmulArgs, added_inside
from tilewright.ops.gemm.operands import FP8, apply_epilogue
from tilewright.ops.rows import accumulate_dtype


def product(args: MatmulArgs, out: Tensor | None = None) -> Tensor:
    """Returns act(alpha * scale * a @ b + bias) + c, rounded once; in float64 for float64 operands.

    `out`: written and returned; may be `c`.
    """
    a, b, bias, c, scale, alpha, activation, out_dtype = args
    if a.dtype == FP8:
        plain = not activation and bias is None and c is None and alpha == 1.0
        z = float8.product(a, b, scale, out_dtype if plain else torch.float32)
        if z is not None:
            result = z if plain else apply_epilogue(z if alpha == 1.0 else z * alpha, bias, c, activation, out_dtype)
            return result if out is None else out.copy_(result)
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)  # every e4m3 number is a bfloat16 number
    if a.dtype == torch.float64:
        out_dtype = torch.float64
    # On a GPU, BLAS adds to a float32 result of halves too
    one_blas_call = a.dtype == out_dtype or (a.device.type == "cuda" and a.dim() == 2 and out_dtype == torch.float32)
    if (
        activation == "" and scale is None and one_blas_call and alpha != 0.0
    ):  # with alpha 0 BLAS returns 0, also for NaN
        addend = c if bias is None else bias
        if addend is None and alpha == 1.0:
            return _multiply(a, b, None, 1.0, out_dtype, out)
        rounds_once = a.device.type != "cuda" or out_dtype == torch.float32 or added_inside(a, bias, c)
        if addend is not None and addend.dtype == out_dtype and (bias is None or c is None) and rounds_once:
            return _multiply(a, b, addend, alpha, out_dtype, out)
    z = _multiply(a, b, None, 1.0, accumulate_dtype(a.dtype))
    if alpha != 1.0:
        z = z * alpha
    if scale is not None:
        z = z * scale.to(z.dtype)
    if activation and z.requires_grad:  # as in `activation.py`: the gradient needs a z, and gets a rounded one
        z, bias = (z if bias is None else z + bias.to(z.dtype)).to(out_dtype).to(z.dtype), None
    result = apply_epilogue(z, bias, c, activation, out_dtype)
    return result if out is None else out.copy_(result)


def _multiply(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: float, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Returns alpha * a @ b + addend, rounded once to `dtype`: that of a, or the accumulator's."""
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, addend))
    if wants_grad and not level_is_open():  # torch's own products have forward-mode derivatives, `_Multiply` has none
        result: Tensor = _Multiply.apply(a, b, addend, alpha, dtype)
        return result
    return _blas(a, b, addend, alpha, dtype, out)


def _blas(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: float, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    matrices = a.dim() == 2
    if dtype != a.dtype:
        # A GPU's BLAS multiplies halves into float32 without rounding in between, and has no forward mode
        if a.device.type == "cuda" and not level_is_open():
            return _widened(a, b, addend, alpha, dtype, out)
        a, b = a.to(dtype), b.to(dtype)
    if addend is None:
        return torch.matmul(a, b, out=out)
    # BLAS adds in its accumulator, before the one rounding; where it does not, this is not called
    add = torch.addmm if matrices else torch.baddbmm
    return add(addend, a, b, alpha=alpha) if out is None else add(addend, a, b, alpha=alpha, out=out)


def _widened(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: float, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    options: dict[str, Any] = {"out_dtype": dtype}  # which torch's stubs lack
    if out is not None:
        options["out"] = out
    result: Tensor
    if addend is None:
        result = (torch.mm if a.dim() == 2 else torch.bmm)(a, b, **options)
    else:
        result = torch.addmm(addend, a, b, alpha=alpha, **options)
    return result


class _Multiply(Function):
    """alpha * a @ b + addend with a gradient.  torch's own gradients would run under the autocast of the backward call,
    and torch has none for a 16-bit product with a float32 result.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, addend: Tensor | None, alpha: float, dtype: torch.dtype) -> Tensor:
        return _blas(a, b, addend, alpha, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, addend, ctx.alpha, _ = inputs
        ctx.addend_dims = 0 if addend is None else addend.dim()
        ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """da = dy b^T and db = a^T dy, by differentiable torch ops, so that create_graph gives second derivatives."""
        a, b = ctx.saved_tensors
        with _without_autocast(dy.device.type):
            da = None if b is None else _scaled(dy.to(b.dtype) @ b.mT, ctx.alpha)
            db = None if a is None else _scaled(a.mT @ dy.to(a.dtype), ctx.alpha)
        dc = dy if ctx.needs_input_grad[2] else None
        if dc is not None and ctx.addend_dims == 1:
            dc = dy.sum(tuple(range(dy.dim() - 1)), dtype=accumulate_dtype(dy.dtype))
        return da, db, dc, None, None


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Disables autocast on devices that have it."""
    return torch.autocast(device, enabled=False) if device in AUTOCASTS else nullcontext()


def _scaled(t: Tensor, alpha: float) -> Tensor:
    return t if alpha == 1.0 else t * alpha
