"""Rotary embedding on a CPU, for apply_rope: compiles and calls `rope.cpp`.

Traffic: reads q and k once and writes as much, with their strides; each token's rows of the tables are read once.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.dispatch.bucket import hint
from tilewright.jit.compilers.kernel_args import I64, Pointer
from tilewright.jit.host_launch import HostKernel
from tilewright.ops.rope.apply_rope import FORWARD
from tilewright.ops.rope.apply_rope.args import ApplyRopeArgs

MAX_ROTARY = 2048  # kMaxRotary in rope.cpp


class Params(NamedTuple):
    """Template parameters.   T, A, I: dtypes of q and k, of cos and sin, of positions."""

    T: torch.dtype
    A: torch.dtype
    I: torch.dtype  # noqa: E741 - the template's name
    kInterleaved: bool


class Args(NamedTuple):
    yq: Pointer
    yk: Pointer
    q: Pointer
    k: Pointer
    cos: Pointer
    sin: Pointer
    positions: Pointer
    b: I64
    s: I64
    h: I64
    h_kv: I64
    d: I64
    r: I64
    table_rows: I64
    yq_b: I64
    yq_h: I64
    yq_s: I64
    yk_b: I64
    yk_h: I64
    yk_s: I64
    q_b: I64
    q_h: I64
    q_s: I64
    k_b: I64
    k_h: I64
    k_s: I64
    table_b: I64
    table_s: I64
    positions_b: I64
    positions_s: I64


_kernel = HostKernel(Path(__file__).with_name("rope.cpp"), "rope", Args, flags=("-ffp-contract=off",))


def why_not(args: ApplyRopeArgs) -> str | None:
    r = hint(args.rotary_dim or args.cos.shape[-1])
    return None if r <= MAX_ROTARY else f"takes rotary dimensions up to {MAX_ROTARY}, got {r}"


@register_kernel(FORWARD, why_not=why_not)
def launch(outs: tuple[Tensor, Tensor], args: ApplyRopeArgs, config: None) -> None:
    q, k, cos, sin = (_unit_stride(t) for t in (args.q, args.k, args.cos, args.sin))
    positions = args.positions
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    packed = q.dim() == 3  # packed sequences are one sequence
    b, h, s, d = (1, q.shape[1], q.shape[0], q.shape[2]) if packed else q.shape
    if positions is None:
        table_strides, positions_strides = _entry_strides(cos, packed), (0, 0)
    else:
        table_strides, positions_strides = (0, cos.stride(0)), _entry_strides(positions, packed)
    (yq, yk), h_kv, r, table_rows = outs, k.shape[1], args.rotary_dim or cos.shape[-1], cos.shape[0]
    kernel_args = Args(
        yq, yk, q, k, cos, sin, positions, b, s, h, h_kv, d, r, table_rows,
        *_head_strides(yq), *_head_strides(yk), *_head_strides(q), *_head_strides(k),
        *table_strides, *positions_strides,
    )  # fmt: skip
    index = torch.int32 if positions is None else positions.dtype
    _kernel(kernel_args, Params(q.dtype, cos.dtype, index, args.interleaved))


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
