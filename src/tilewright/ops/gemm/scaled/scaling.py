"""The granularity of scales, inferred from shapes, and the layout in which kernels read them.

scale_a (..., M blocks, K blocks) belongs to a (..., M, K); scale_b (..., N blocks, K blocks) to b.mT, (..., N, K).
Where sizes are so small that two granularities have one shape, they mean the same.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.errors import InputError
from tilewright.log import log_once
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.quant.layout import BLOCK, ROW, TENSOR, TOKEN, ScaleLayout
from tilewright.settings import current


class Scaling(IntEnum):
    """Granularities of a and b that kernels support, numbered as in buckets."""

    TENSOR = 0
    """One scale each."""
    ROW = 1
    """One for each row of a, one for each column of b."""
    TOKEN_BLOCK = 2
    """1x128 of a, 128x128 of b: activations times weights ("1D2D", recipe (1, 128, 128))."""
    TOKEN_TOKEN = 3
    """1x128 of both: weight gradients ("1D1D", recipe (1, 1, 128))."""
    OTHER = 4
    """Any other pair: no kernel supports it."""

    @property
    def layouts(self) -> tuple[ScaleLayout, ScaleLayout]:
        """The scale layouts of a and of b; OTHER has none."""
        return _LAYOUTS[self]


_LAYOUTS = {
    Scaling.TENSOR: (TENSOR, TENSOR),
    Scaling.ROW: (ROW, ROW),
    Scaling.TOKEN_BLOCK: (TOKEN, BLOCK),
    Scaling.TOKEN_TOKEN: (TOKEN, TOKEN),
}
GRANULARITIES = {"one for all": TENSOR, "one a row": ROW, "1x128": TOKEN, "128x128": BLOCK}
"""What `scale_a` and `scale_b` may be, in words."""


def scaling_of(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Scaling:
    """Infers the scaling from shapes; a (..., M, K), b (..., K, N), scale_b of b.mT.  Symbolic sizes by their hints."""
    m, k, n = (hint(size) for size in (*a.shape[-2:], b.shape[-1]))
    shapes = tuple(map(hint, scale_a.shape[-2:])), tuple(map(hint, scale_b.shape[-2:]))
    for scaling, (layout_a, layout_b) in _LAYOUTS.items():
        if shapes == (layout_a.shape(m, k), layout_b.shape(n, k)):
            return scaling
    return Scaling.OTHER


def granularity(shape: Sequence[int], rows: int, depth: int) -> ScaleLayout | None:
    """Returns the layout whose scales of a (..., rows, depth) tensor have this shape; None if there is none."""
    layouts = (layout for layout in GRANULARITIES.values() if tuple(shape[-2:]) == layout.shape(rows, depth))
    return next(layouts, None)


def kernel_layouts(op: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both scale tensors as kernels of this scaling read them; see `kernel_layout`."""
    layout_a, layout_b = scaling_of(a, b, scale_a, scale_b).layouts
    m, k, n = (*a.shape[-2:], b.shape[-1])
    return kernel_layout(op, "scale_a", scale_a, layout_a, m, k), kernel_layout(op, "scale_b", scale_b, layout_b, n, k)


def kernel_layout(op: str, name: str, scales: Tensor, layout: ScaleLayout, rows: int, depth: int) -> Tensor:
    """Returns `scales` (..., *layout.shape(rows, depth)) if kernels can read them in place, else a copy.

    A copy is a launch that the caller does not see: it is logged, once for each operand of an op, and refused with
    InputError under TILEWRIGHT_DISABLE_FALLBACK.
    """
    reason = layout.mismatch(scales, rows, depth)
    if reason is None and layout is TOKEN and not copyable(scales):
        reason = "do not start at, or step by, a multiple of 16 bytes"
    if reason is None:
        return scales
    _announce(op, name, scales, f"{reason}. The casts of tilewright.ops write scales so")
    return layout.empty(rows, depth, scales.device, *scales.shape[:-2]).copy_(scales)


def folded(op: str, name: str, scales: Any, rows: Sequence[int]) -> Any:
    """Returns scales (*rows, K blocks) of an operand (*rows, K) with all rows folded into one dimension.

    A view where strides allow, else a copy, logged as in `kernel_layout`.  One scale for all, (1, 1), stays.  The
    checks refuse what are no scales of rows.
    """
    if not isinstance(scales, Tensor) or scales.dim() == 2 or tuple(scales.shape[:-1]) != tuple(rows):
        return scales
    steps = [(n, s) for n, s in zip(scales.shape[:-1], scales.stride(), strict=False) if n != 1]
    if all(stride == n * inner for (_, stride), (n, inner) in pairwise(steps)):
        return scales.flatten(0, -2)
    _announce(op, name, scales, f"do not fold into {math.prod(rows)} rows. Flatten x to two dimensions before its cast")
    copy = TOKEN.empty(math.prod(rows), TOKEN.depth * scales.shape[-1], scales.device)
    copy.unflatten(0, tuple(rows)).copy_(scales)
    return copy


def _announce(op: str, name: str, scales: Tensor, reason: str) -> None:
    if torch.compiler.is_compiling():  # traced code can neither log nor read settings
        return
    message = f"{op}: the scales {name} {reason}"
    if current().disable_fallback:
        raise InputError(f"{message}. TILEWRIGHT_DISABLE_FALLBACK forbids the copy.")
    log_once(("scales", op, name), f"{message}; until then each call copies them.")
