"""Converts the arguments of a public grouped product to those of its raw op."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.arguments import refuse_layout
from tilewright.errors import InputError
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.operands import FP8, unit_stride
from tilewright.ops.gemm.scaled.scaling import Scaling, kernel_layouts, scaling_of


def rows_arguments(
    op: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    expected: int,
    activation: str | None,
    trans_b: bool,
    out_dtype: torch.dtype | None,
) -> GroupedArgs:
    """Returns the raw arguments; a is (Ba, R, K), scale_a (Ba, ., .), everything else as in the public function."""
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype == FP8 else a.dtype
    right = b.mT if trans_b else b
    left_scale, right_scale = laid_out(op, a, right, scale_a, transposed_scales(scale_b, trans_b))
    return GroupedArgs(
        unit_stride(a),
        unit_stride(right),
        left_scale,
        right_scale,
        contiguous(starts),
        contiguous(ends),
        expected,
        activation or "",
        out_dtype,
    )


def laid_out(
    op: str, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the scales of a (..., R, K) and b.mT as kernels read them; the checks refuse what is no such pair."""
    if not (isinstance(scale_a, Tensor) and isinstance(scale_b, Tensor)):
        return scale_a, scale_b
    if scale_a.shape[:-2] != a.shape[:-2] or scale_b.shape[:-2] != b.shape[:-2]:
        return scale_a, scale_b
    if scaling_of(a, b, scale_a, scale_b) is Scaling.OTHER or not scale_a.dtype == scale_b.dtype == torch.float32:
        return scale_a, scale_b
    return kernel_layouts(op, a, b, scale_a, scale_b)


def matrices(op: str, a: Any, b: Any, dims: int, form: str) -> None:
    """Raises InputError unless a is a tensor of `dims` dimensions and b one of 3: only such can be transposed."""
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.is_nested:
            refuse_layout(op, **{name: t})
    if a.dim() != dims or b.dim() != 3:
        raise InputError(f"{op}: a is {tuple(a.shape)}, b is {tuple(b.shape)}; needs {form}.")


def transposed_scales(scale: Any, is_transposed: bool) -> Any:
    """Returns scales (..., K blocks, N blocks) as those of b.mT, unless they are so already."""
    return scale.mT if isinstance(scale, Tensor) and scale.dim() > 1 and not is_transposed else scale


def contiguous(t: Any) -> Any:
    """Returns starts or ends as a contiguous tensor."""
    return t.contiguous() if isinstance(t, Tensor) else t
