"""Checks of attention's arguments before anything is launched."""

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.attention.arguments import FmhaArgs
from tilewright.ops.attention.layout import LAYOUTS
from tilewright.ops.rows import FLOATS


def check_layout(op: str, layout: Any) -> None:
    """A known order of dimensions."""
    if layout not in LAYOUTS:
        raise InputError(f"{op}: layout is {layout!r}; allowed are {', '.join(map(repr, LAYOUTS))}.")


def check_heads(op: str, q: Any, k: Any, v: Any) -> None:
    """Three tensors of four dimensions: what can be transposed, and asked for its sizes."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dim() != 4:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)}; needs (B, H, S, D), or (B, S, H, D) with layout='BSHD'."
            )
        if t.dtype not in FLOATS:
            raise InputError(f"{op}: {name} is {t.dtype}; needs one of bfloat16, float16, float32. Cast it first.")


def check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Sizes that go together, one dtype, one device."""
    check_heads(op, q, k, v)
    (b, h, _, d), (b_k, h_k, s_k, d_k), (b_v, h_v, s_v, d_v) = q.shape, k.shape, v.shape
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as (B, H, S, D)"
    if b != b_k or b != b_v:
        raise InputError(f"{op}: {shapes}; they must agree in B.")
    if (h_k, s_k) != (h_v, s_v):
        raise InputError(f"{op}: {shapes}; k and v must agree in H and S.")
    if d != d_k or d == 0 or d_v == 0:
        raise InputError(f"{op}: {shapes}; q and k must agree in D, which is at least 1, as is that of v.")
    if h_k == 0 or h % h_k:
        raise InputError(f"{op}: {shapes}; the heads of q must be a multiple of those of k and v.")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"{op}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must have one dtype.")
    if not q.device == k.device == v.device:
        raise InputError(f"{op}: q is on {q.device}, k on {k.device}, v on {v.device}. Move them to one device.")


def check_scale(op: str, scale: Any) -> None:
    """A finite number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise InputError(f"{op}: scale is {scale!r}; needs a finite number.")


def check_dropout(op: str, dropout: Any) -> None:
    """A probability below 1."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise InputError(f"{op}: dropout is {dropout!r}; needs a number from 0 to below 1.")


def check_raw(op: str, args: FmhaArgs) -> None:
    """Raises InputError for raw arguments that cannot run."""
    q, k, v, mask = args.q, args.k, args.v, args.mask
    check_shapes(op, q, k, v)
    check_scale(op, args.scale)
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        raise InputError(f"{op}: q, k or v has another last stride than 1. Call .contiguous().")
    for name, t in (("sinks", args.sinks), ("slopes", args.slopes)):
        if t is None:
            continue
        dtypes = (torch.float64, torch.float32) if q.dtype == torch.float64 else (torch.float32,)
        if tuple(t.shape) != (q.shape[1],) or t.dtype not in dtypes or t.device != q.device:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)} {t.dtype} on {t.device}; needs ({q.shape[1]},), one float32 a head, "
                f"on {q.device}."
            )
    if args.slopes is not None and args.slopes.requires_grad and torch.is_grad_enabled():
        raise InputError(f"{op}: the slopes of alibi require a gradient, and have none. Detach them.")
    band = mask.left, mask.right
    if min(band) < -1 or args.softcap < 0 or (mask.program and (mask.mask_data is None or max(band) >= 0)):
        raise InputError(
            f"{op}: left {mask.left}, right {mask.right}, softcap {args.softcap}, program {mask.program!r} do not go "
            "together."
        )
    data = mask.mask_data
    if data is not None and (data.dtype != torch.int32 or data.device != q.device):
        raise InputError(f"{op}: the mask is {data.dtype} on {data.device}; needs int32 on {q.device}.")
