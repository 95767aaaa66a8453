"""Checks of the arguments of scaled products: InputError before any launch."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.arguments import refuse_layout
from tilewright.errors import InputError
from tilewright.ops.gemm.dense.checks import check_epilogue
from tilewright.ops.gemm.operands import ACTIVATIONS, FP8
from tilewright.ops.gemm.scaled.args import ScaledMatmulArgs
from tilewright.ops.gemm.scaled.scaling import GRANULARITIES, granularity


def check_scaled(op: str, args: ScaledMatmulArgs) -> None:
    """Raises InputError for raw arguments that cannot run: a (M, K), b (K, N), scale_b as of b.mT."""
    a, b, activation = args.a, args.b, args.activation
    check_fp8(op, a, b)
    if a.dim() != 2 or b.dim() != 2:
        raise InputError(f"{op}: a is {tuple(a.shape)}, b is {tuple(b.shape)}; needs (M, K) and (K, N).")
    if a.shape[1] != b.shape[0]:
        raise InputError(
            f"{op}: op(a) is {tuple(a.shape)} and op(b) is {tuple(b.shape)}; they must agree in K. "
            "trans_a=True and trans_b=True swap the last two dimensions."
        )
    _check_scales(op, "scale_a", args.scale_a, "a (M, K)", a)
    _check_scales(op, "scale_b", args.scale_b, "op(b).mT (N, K)", b.mT)
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{op}: activation is {activation!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS[1:]))}."
        )
    check_epilogue(op, (a.shape[0], b.shape[1]), a, args.bias, args.c, activation)
    if not isinstance(args.alpha, (int, float, torch.SymFloat)):
        raise InputError(f"{op}: alpha is a {type(args.alpha).__name__}; needs a number. Multiply scale_a by a tensor.")
    tensors = (args.scale_a, args.scale_b, args.bias, args.c)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise InputError(f"{op}: a gradient is wanted of a product of float8, which has none. Use torch.no_grad().")


def check_fp8(op: str, a: Any, b: Any) -> None:
    """Checks for two e4m3 matrices on one device."""
    refuse_layout(op, a=a, b=b)
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dtype != FP8:
            raise InputError(
                f"{op}: {name} is {t.dtype}; needs float8_e4m3fn with scales. Quantise it with per_token_cast_to_fp8 "
                "or per_block_cast_to_fp8, or call matmul without scales."
            )
        if t.dim() < 2:
            raise InputError(f"{op}: {name} is {tuple(t.shape)}; needs matrices. Add a dimension with unsqueeze.")
    if a.device != b.device:
        raise InputError(f"{op}: a is on {a.device}, b on {b.device}. Move them to one device.")


def _check_scales(op: str, name: str, scales: Any, what: str, operand: Tensor) -> None:
    """Checks for float32 scales of one of the granularities, on the device of `operand` (rows, K)."""
    if not isinstance(scales, Tensor):
        raise InputError(f"{op}: {name} is a {type(scales).__name__}; needs a float32 tensor.")
    if scales.dtype == torch.int32:
        raise InputError(
            f"{op}: {name} is torch.int32, packed powers of two as Blackwell's tensor cores read them; "
            "this product reads float32. Cast with ue8m0=True and packed=False."
        )
    if scales.dtype != torch.float32:
        raise InputError(f"{op}: {name} is {scales.dtype}; needs float32.")
    if scales.device != operand.device:
        raise InputError(f"{op}: {name} is on {scales.device}, the operands on {operand.device}.")
    rows, depth = operand.shape
    if scales.dim() != 2 or granularity(scales.shape, rows, depth) is None:
        allowed = ", ".join(f"{layout.shape(rows, depth)} ({words})" for words, layout in GRANULARITIES.items())
        raise InputError(
            f"{op}: {name} is {tuple(scales.shape)}; for {what} = {tuple(operand.shape)} it may be {allowed}. "
            "Scales are given as their operand is: transposed where it is."
        )
