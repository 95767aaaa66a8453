"""Checks of GEMM arguments: InputError before any launch."""

import torch
from torch import Tensor

from tilewright.dispatch.arguments import refuse_layout
from tilewright.errors import InputError
from tilewright.ops.gemm.dense.args import MatmulArgs
from tilewright.ops.gemm.operands import ACTIVATIONS, FP8, RESULTS, columns_out, major_a, major_b
from tilewright.ops.rows import FLOATS

OPERANDS = (*RESULTS, torch.float64, FP8)


def check_raw(op: str, dims: int, args: MatmulArgs) -> None:
    """Raises InputError for raw arguments that cannot run; `dims` is 2 for `matmul`, 3 for `bmm`."""
    a, b, activation = args.a, args.b, args.activation
    check_operands(op, a, b)
    if a.dim() != dims or b.dim() != dims:
        form = "(M, K) and (K, N)" if dims == 2 else "(B, M, K) and (B, K, N)"
        raise InputError(f"{op}: a is {tuple(a.shape)}, b is {tuple(b.shape)}; needs {form}.")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        what = "K" if a.shape[-1] != b.shape[-2] else "B"
        raise InputError(
            f"{op}: op(a) is {tuple(a.shape)} and op(b) is {tuple(b.shape)}; they must agree in {what}. "
            "trans_a=True and trans_b=True swap the last two dimensions."
        )
    if major_a(a) is None or major_b(b) is None:
        raise InputError(
            f"{op}: a has strides {a.stride()}, b {b.stride()}; one of the last two must be 1. Call .contiguous()."
        )
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{op}: activation is {activation!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS[1:]))}."
        )
    check_out_dtype(op, a.dtype, args.out_dtype)
    check_epilogue(op, (*a.shape[:-1], b.shape[-1]), a, args.bias, args.c, activation)
    _check_scale(op, a, args.scale, args.alpha)
    _check_gradient(op, args)


def are_matrices(a: Tensor, b: Tensor) -> bool:
    """Returns whether `a` and `b` can be transposed and folded; `check_raw` finds all other faults."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor) and not (a.is_nested or b.is_nested)
    return both and a.dim() > 1 and b.dim() > 1


def check_operands(op: str, a: Tensor, b: Tensor) -> None:
    """Checks for two matrices of one dtype on one device."""
    refuse_layout(op, a=a, b=b)
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dtype not in OPERANDS:
            raise InputError(
                f"{op}: {name} is {t.dtype}; needs one of bfloat16, float16, float32, float8_e4m3fn. Cast it first."
            )
        if t.dim() < 2:
            raise InputError(f"{op}: {name} is {tuple(t.shape)}; needs matrices. Add a dimension with unsqueeze.")
    if a.dtype != b.dtype:
        raise InputError(f"{op}: a is {a.dtype}, b is {b.dtype}; they must have one dtype.")
    if a.device != b.device:
        raise InputError(f"{op}: a is on {a.device}, b on {b.device}. Move them to one device.")


def check_out_dtype(op: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Checks for a result of bfloat16, float16 or float32; float64 for float64 operands and only for them."""
    allowed = (torch.float64,) if dtype == torch.float64 else RESULTS
    if out_dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise InputError(f"{op}: out_dtype is {out_dtype}; of {dtype} operands it may be {names}.")


def check_epilogue(
    op: str, shape: tuple[int, ...], first: Tensor, bias: Tensor | None, c: Tensor | None, activation: str
) -> None:
    """Checks bias (N,) and c (..., M, N_out) for a product of `shape` on the device of `first`; N is even for a gate.
    float64 goes with float64 operands alone.
    """
    floats = FLOATS if first.dtype == torch.float64 else RESULTS
    n = shape[-1]
    if activation == "swiglu" and n % 2:
        raise InputError(f"{op}: swiglu pairs gate and up columns, and op(b) has {n}; N must be even.")
    n_out = columns_out(n, activation)
    for name, t, expected in (("bias", bias, (n,)), ("c", c, (*shape[:-1], n_out))):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dtype not in floats:
            got = t.dtype if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise InputError(f"{op}: {name} is {got}; needs a tensor of bfloat16, float16 or float32.")
        if tuple(t.shape) != tuple(expected):
            raise InputError(f"{op}: {name} is {tuple(t.shape)}; needs {tuple(expected)}.")
        if t.device != first.device:
            raise InputError(f"{op}: {name} is on {t.device}, the operands on {first.device}. Move them to one device.")


def _check_scale(op: str, a: Tensor, scale: Tensor | None, alpha: float) -> None:
    if not isinstance(alpha, (int, float, torch.SymFloat)):
        raise InputError(f"{op}: alpha is a {type(alpha).__name__}; needs a number, or one float32 in a tensor.")
    if scale is None:
        return
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != a.device:
        raise InputError(
            f"{op}: alpha is {tuple(scale.shape)} {scale.dtype} on {scale.device}; as a tensor it is one float32 on "
            f"{a.device}. Plain numbers may be Python floats."
        )


def _check_gradient(op: str, args: MatmulArgs) -> None:
    if not torch.is_grad_enabled():
        return
    if args.scale is not None and args.scale.requires_grad:
        raise InputError(f"{op}: alpha requires a gradient, and has none here. Detach it, or multiply outside.")
    needs_grad = any(t is not None and t.requires_grad for t in (args.a, args.b, args.bias, args.c))
    if needs_grad and args.a.dtype == FP8:
        raise InputError(f"{op}: a gradient is wanted of float8 operands, which have none. Use torch.no_grad().")
    if needs_grad and args.activation:
        raise InputError(
            f"{op}: the op with an activation has no gradient; call tilewright.ops.{op}, which takes it apart."
        )
