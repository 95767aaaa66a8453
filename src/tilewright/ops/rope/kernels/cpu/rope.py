"""Rotary embedding on a CPU: compiles and calls `rope.cpp`.

Traffic: reads q and k once and writes as much, with their strides; each token's rows of the tables are read once.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.dispatch.bucket import hint
from tilewright.jit.host_launch import HostKernel

MAX_ROTARY = 2048  # kMaxRotary in rope.cpp


class Params(NamedTuple):
    """Template parameters.   T, A, I: dtypes of q and k, of cos and sin, of positions."""

    T: torch.dtype
    A: torch.dtype
    I: torch.dtype  # noqa: E741 - the template's name
    kInterleaved: bool


_kernel = HostKernel(Path(__file__).with_name("rope.cpp"), "rope", "P" * 7 + "q" * 23, flags=("-ffp-contract=off",))


def why_not(q: Tensor, k: Tensor, cos: Tensor, *rest: Any) -> str | None:
    r = hint(rest[-1] or cos.shape[-1])
    return None if r <= MAX_ROTARY else f"takes rotary dimensions up to {MAX_ROTARY}, got {r}"


@register_impl("apply_rope", backend="cpu", supports=why_not)
def launch(
    outs: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    rotary_dim: int,
    *,
    config: None,
) -> None:
    q, k, cos, sin = _unit_stride(q), _unit_stride(k), _unit_stride(cos), _unit_stride(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    r = rotary_dim or cos.shape[-1]
    packed = q.dim() == 3  # packed sequences are one sequence
    b, h, s, d = (1, q.shape[1], q.shape[0], q.shape[2]) if packed else q.shape
    if positions is None:
        table_strides, positions_strides = _entry_strides(cos, packed), (0, 0)
    else:
        table_strides, positions_strides = (0, cos.stride(0)), _entry_strides(positions, packed)
    head_strides = (stride for x in (*outs, q, k) for stride in _head_strides(x))
    sizes = (b, s, h, k.shape[1], d, r, cos.shape[0])
    index = torch.int32 if positions is None else positions.dtype
    params = Params(q.dtype, cos.dtype, index, interleaved)
    _kernel((*outs, q, k, cos, sin, positions, *sizes, *head_strides, *table_strides, *positions_strides), params)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _head_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token."""
    return (0, x.stride(1), x.stride(0)) if x.dim() == 3 else (x.stride(0), x.stride(1), x.stride(2))


def _entry_strides(entries: Tensor, packed: bool) -> tuple[int, int]:
    """Strides of batch and token.   entries: (B or 1, S, ...), or packed (T, ...)."""
    if packed:
        return 0, entries.stride(0)
    return (entries.stride(0) if entries.shape[0] > 1 else 0), entries.stride(1)
