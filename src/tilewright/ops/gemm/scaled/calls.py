"""Converts the arguments of a public scaled product to those of its raw op."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.log import log_once
from tilewright.ops.gemm.dense.checks import are_matrices
from tilewright.ops.gemm.operands import fold
from tilewright.ops.gemm.scaled.checks import check_fp8
from tilewright.ops.gemm.scaled.scaling import folded


def operands(
    op: str, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, trans_a: bool, trans_b: bool
) -> tuple[Sequence[int], tuple[Tensor, Tensor, Any, Any, Any]]:
    """Returns (rows, (a (M, K), b (K, N), scale_a (Mb, Kb), scale_b (Nb, Kb), bias)), a and b contiguous along K.

    `rows` are the leading dimensions of op(a) before folding.
    """
    if not are_matrices(a, b):
        check_fp8(op, a, b)
    left, right, left_scale, right_scale = transposed(a, b, scale_a, scale_b, trans_a, trans_b)
    rows = left.shape[:-1]
    if len(rows) > 1:
        left, left_scale = fold(op, "a", left, rows), folded(op, "scale_a", left_scale, rows)
    if isinstance(bias, Tensor):
        bias = bias.contiguous()
    return rows, (_k_major(op, "a", left), _k_major(op, "b", right.mT).mT, left_scale, right_scale, bias)


def transposed(
    a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, trans_a: bool, trans_b: bool
) -> tuple[Tensor, Tensor, Any, Any]:
    """op(a) (..., M, K), op(b) (K, N), and their scales, (..., M blocks, K blocks) and (N blocks, K blocks)."""
    left_scale, right_scale = (_swapped(scale_a) if trans_a else scale_a), (scale_b if trans_b else _swapped(scale_b))
    return (a.mT if trans_a else a), (b.mT if trans_b else b), left_scale, right_scale


def _swapped(scales: Any) -> Any:
    """Returns the transpose; the checks refuse what is no matrix."""
    return scales.mT if isinstance(scales, Tensor) and scales.dim() > 1 else scales


def _k_major(op: str, name: str, t: Tensor) -> Tensor:
    """Returns `t` (..., K) if it is contiguous along K, else a copy that is, logged once.  Tensors without strides pass
    as they are.
    """
    if t.layout is not torch.strided or t.stride(-1) == 1:
        return t
    if not torch.compiler.is_compiling():  # Dynamo cannot trace logging
        log_once(
            ("k_major", op, name),
            f"{op}: {name} is not contiguous along K, and each call copies it so that it is, as tensor cores read "
            "float8. per_channel_cast_to_fp8 and per_block_cast_to_fp8 write the transpose with transpose=True.",
        )
    return t.clone(memory_format=torch.contiguous_format)
