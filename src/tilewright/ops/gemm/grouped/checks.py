"""Checks of the arguments of grouped products: InputError before any launch.  No check reads a value on the device."""

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.gemm.dense.checks import check_operands, check_out_dtype
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.operands import ACTIVATIONS, FP8, major_a, major_b
from tilewright.ops.gemm.scaled.scaling import GRANULARITIES, granularity


def check_rows(op: str, args: GroupedArgs) -> None:
    """Raises InputError for raw arguments of `grouped_matmul` or `masked_matmul` that cannot run."""
    a, b, activation = args.a, args.b, args.activation
    check_operands(op, a, b)
    masked = op == "masked_matmul"
    if a.dim() != 3 or b.dim() != 3:
        form = "(G, Mmax, K) and (G, K, N)" if masked else "(T, K) and (G, K, N)"
        a_shape = tuple(a.shape) if masked or a.dim() != 3 else tuple(a.shape[1:])
        raise InputError(f"{op}: a is {a_shape}, b is {tuple(b.shape)}; needs {form}.")
    if a.shape[2] != b.shape[1]:
        raise InputError(
            f"{op}: a has K={a.shape[2]} and op(b) is {tuple(b.shape)}, (G, K, N); they must agree in K. "
            "trans_b=True swaps the last two dimensions of b."
        )
    if masked and a.shape[0] != b.shape[0]:
        raise InputError(f"{op}: a has {a.shape[0]} groups, b has {b.shape[0]}; they must agree in G.")
    check_strides(op, a, b)
    if activation not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS[1:]))
        raise InputError(f"{op}: activation is {activation!r}; allowed are None, {allowed}.")
    if activation == "swiglu" and b.shape[2] % 2:
        raise InputError(f"{op}: swiglu pairs gate and up columns, and op(b) has {b.shape[2]}; N must be even.")
    check_out_dtype(op, a.dtype, args.out_dtype)
    check_sizes(op, "rows" if masked else "ends", args.ends, a, b.shape[0])
    if args.starts is not None:
        check_sizes(op, "starts", args.starts, a, b.shape[0])
    if not isinstance(args.expected_rows, (int, torch.SymInt)) or isinstance(args.expected_rows, bool):
        raise InputError(f"{op}: expected_rows is {args.expected_rows!r}; needs a number of rows.")
    check_scales(op, a, b, args.scale_a, args.scale_b)
    check_gradient(op, a, b, activation)
    if args.starts is not None and b.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{op}: the gradient of b needs groups without gaps, one behind the other. Leave starts= away, or detach b."
        )


def check_strides(op: str, a: Tensor, b: Tensor) -> None:
    """Checks for a unit stride among the last two of each."""
    if major_a(a) is None or major_b(b) is None:
        raise InputError(
            f"{op}: a has strides {a.stride()}, b {b.stride()}; one of the last two must be 1. Call .contiguous()."
        )


def check_sizes(op: str, name: str, t: Tensor, first: Tensor, groups: int) -> None:
    """Checks starts, ends or numbers of rows: (G,) int32 on the device of the operands."""
    if not isinstance(t, Tensor):
        raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a tensor of {groups} int32 on {first.device}.")
    if t.dtype != torch.int32 or t.dim() != 1 or t.shape[0] != groups:
        raise InputError(
            f"{op}: {name} is {tuple(t.shape)} {t.dtype}; needs ({groups},) torch.int32, one number a group."
        )
    if t.device != first.device:
        raise InputError(
            f"{op}: {name} is on {t.device}, the operands on {first.device}. Sizes of groups live on the device: "
            "compute them there, no kernel waits for the host."
        )


def check_scales(op: str, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> None:
    """Checks for both scales or none, with float8 operands: a (..., R, K), b (..., K, N), scale_b of b.mT."""
    if scale_a is None and scale_b is None:
        return
    if scale_a is None or scale_b is None:
        raise InputError(f"{op}: {'scale_a' if scale_a is None else 'scale_b'} is missing; give both scales, or none.")
    if a.dtype != FP8:
        raise InputError(f"{op}: scales go with float8_e4m3fn operands, and a is {a.dtype}.")
    for name, operand, scale, what in (("scale_a", a, scale_a, "(rows, K) of a"), ("scale_b", b.mT, scale_b, "(N, K)")):
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            got = scale.dtype if isinstance(scale, Tensor) else f"a {type(scale).__name__}"
            raise InputError(f"{op}: {name} is {got}; needs a float32 tensor.")
        if scale.device != a.device:
            raise InputError(f"{op}: {name} is on {scale.device}, the operands on {a.device}. Move it there.")
        rows, depth = operand.shape[-2:]
        if scale.shape[:-2] != operand.shape[:-2] or granularity(scale.shape, rows, depth) is None:
            lead = tuple(operand.shape[:-2])
            allowed = ", ".join(f"{(*lead, *g.shape(rows, depth))} ({words})" for words, g in GRANULARITIES.items())
            raise InputError(
                f"{op}: {name} is {tuple(scale.shape)}; for {what} = {tuple(operand.shape)} it may be {allowed}. "
                "Scales are given as their operand is: transposed where it is."
            )


def check_gradient(op: str, a: Tensor, b: Tensor, activation: str) -> None:
    """Refuses gradients of everything but `grouped_matmul` in bfloat16, float16 and float32 without an activation."""
    if not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return
    if a.dtype == FP8:
        raise InputError(f"{op}: a gradient is wanted of float8 operands, which have none. Use torch.no_grad().")
    if op != "grouped_matmul":
        raise InputError(f"{op} has no gradient, and an operand requires one. Use grouped_matmul, or torch.no_grad().")
    if activation:
        raise InputError(
            f"{op}: the op with an activation has no gradient; call tilewright.ops.{op}, which takes it apart."
        )
