"""Checks of the arguments of `apply_rope`."""

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.rope.apply_rope.args import ApplyRopeArgs


def check(args: ApplyRopeArgs) -> None:
    """Raise InputError for what the docstring of `apply_rope` excludes."""
    check_rotation("apply_rope", args)


def check_rotation(op: str, args: ApplyRopeArgs) -> None:
    """Raise InputError for a rotation that `op` cannot make."""
    q, k, cos, sin = args.q, args.k, args.cos, args.sin
    rows.check_floating(op, q=q, k=k, cos=cos, sin=sin)
    _check_heads(op, q, k)
    rows.check_same(op, cos=cos, sin=sin)
    if cos.dtype == torch.float64 and q.dtype != torch.float64:
        raise InputError(f"{op}: cos and sin are float64, q is {q.dtype}; use tables of at most float32.")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise InputError(f"{op}: cos or sin requires a gradient and gets none. Pass cos.detach(), sin.detach().")
    _check_width(op, q, cos, args.rotary_dim)
    if args.positions is None:
        _check_tokens(op, q, "cos and sin have rows", cos.shape[:-1])
    else:
        _check_positions(op, q, cos, args.positions)


def _check_heads(op: str, q: Tensor, k: Tensor) -> None:
    same = q.dim() in (3, 4) and k.dim() == q.dim() and k.dtype == q.dtype
    if not same or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise InputError(
            f"{op}: q is {tuple(q.shape)} {q.dtype}, k is {tuple(k.shape)} {k.dtype}; needs one dtype and "
            "(B, H, S, D) with (B, H_kv, S, D), or packed (T, H, D) with (T, H_kv, D)."
        )


def _check_width(op: str, q: Tensor, cos: Tensor, rotary_dim: int) -> None:
    width, d = cos.shape[-1], q.shape[-1]
    r = rotary_dim or width
    if r % 2 or not 2 <= r <= d or (width != r and 2 * width != r):
        raise InputError(
            f"{op}: cos has {width} columns, rotary_dim is {rotary_dim or None}, D is {d}; needs an even "
            "rotary_dim (default: the columns of cos) from 2 to D, and as many columns or half as many."
        )


def _check_tokens(op: str, q: Tensor, what: str, shape: torch.Size) -> None:
    """`shape` has one entry for each token of q; a batch of 1 serves all."""
    packed = q.dim() == 3
    tokens = q.shape[:1] if packed else (q.shape[0], q.shape[2])
    if len(shape) != len(tokens) or shape[-1] != tokens[-1] or (not packed and shape[0] not in (1, tokens[0])):
        needs = f"{tuple(tokens)}" if packed else f"{tuple(tokens)} or {(1, tokens[1])}"
        raise InputError(
            f"{op}: {what} {tuple(shape)}; q {tuple(q.shape)} needs {needs}. A table of P positions needs positions=."
        )


def _check_positions(op: str, q: Tensor, cos: Tensor, positions: Tensor) -> None:
    if positions.dtype not in (torch.int32, torch.int64) or positions.device != q.device:
        raise InputError(
            f"{op}: positions is {positions.dtype} on {positions.device}; needs int32 or int64 on {q.device}."
        )
    if cos.dim() != 2:
        raise InputError(f"{op}: cos is {tuple(cos.shape)}; with positions it must be a table (P, columns).")
    _check_tokens(op, q, "positions is", positions.shape)
    # On a GPU the check would need a synchronisation; traced tensors have no values.
    if positions.device.type == "cpu" and type(positions) in (Tensor, Parameter) and positions.numel():
        low, high = (int(v) for v in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise InputError(
                f"{op}: positions reach from {low} to {high}; the table has rows 0 to {cos.shape[0] - 1}. "
                "Make a longer table."
            )
