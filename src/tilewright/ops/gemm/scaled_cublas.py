"""Scaled products by cuBLASLt, through `torch._scaled_mm`.

It takes K-major operands, sizes in multiples of 16 and blocks of scales that are whole; others are padded with zeros
here.  Operands and scales begin at multiples of 16 bytes, which a row cut out of a batch need not do (the scale of row
19 lies at byte 76): such are copied.  What else it takes differs between versions and GPUs, so each scaling is tried
once, on a small product.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from tilewright.log import logger
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.gemm.scaling import Scaling, scaling_of


class _Units(NamedTuple):
    """What sizes have to be multiples of."""

    m: int
    n: int
    k: int


# Versions disagree about the pitch of 128x128 scales along K: where blocks come in fours there is one answer
_UNITS = {
    Scaling.TENSOR: _Units(16, 16, 16),
    Scaling.ROW: _Units(16, 16, 16),
    Scaling.TOKEN_BLOCK: _Units(16, 128, 512),
    Scaling.TOKEN_TOKEN: _Units(16, 128, 128),
}


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor | None:
    """(a * scale_a) @ (b * scale_b) of e4m3 a (M, K), b (K, N), rounded once to bf16 or float32; scale_b is of b.mT.

    None where cuBLAS does not take them: on other devices, scalings and GPUs.
    """
    scaling = scaling_of(a, b, scale_a, scale_b)
    if a.device.type != "cuda" or not takes(a.device.index or 0, scaling):
        return None
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, k, n):
        return a.new_zeros((m, n), dtype=dtype)
    unit = _UNITS[scaling]
    left, right = padded(a, unit.m, unit.k), padded(b.mT, unit.n, unit.k)
    scales = scales_for(scaling, scale_a, scale_b, left, right)
    made = torch._scaled_mm(left, right.mT, *scales, out_dtype=dtype, use_fast_accum=False)
    return made if made.shape == (m, n) else made[:m, :n].contiguous()


def scales_for(
    scaling: Scaling, scale_a: Tensor, scale_b: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    """Both as `torch._scaled_mm` takes them beside the padded operands left (M, K) and right (N, K): those of 1x128
    without a gap along rows, others contiguous, scale_b transposed, (K blocks, N blocks).
    """
    rows, columns, blocks = left.shape[0], right.shape[0], left.shape[1] // 128
    if scaling is Scaling.TENSOR:
        return _at_16_bytes(scale_a.reshape(())), _at_16_bytes(scale_b.reshape(()))
    if scaling is Scaling.ROW:
        return _lines(padded(scale_a, rows, 1)), _lines(padded(scale_b, columns, 1).mT)
    along_rows = _lines(padded(scale_a, rows, blocks).mT).mT
    if scaling is Scaling.TOKEN_TOKEN:
        return along_rows, _lines(padded(scale_b, columns, blocks).mT)
    return along_rows, _lines(padded(scale_b, 1, blocks)).mT


def padded(t: Tensor, rows: int, columns: int) -> Tensor:
    """`t` (R, C) with zeros behind it up to multiples of `rows` and `columns`, contiguous along C.

    Itself if it is all that, and its lines begin at multiples of 16 bytes; of scales that is left to `scales_for`.
    """
    more_rows, more_columns = -t.shape[0] % rows, -t.shape[1] % columns
    if more_rows or more_columns:  # as bytes: torch pads no float8
        raw = t.view(torch.uint8) if t.element_size() == 1 else t
        return pad(raw, (0, more_columns, 0, more_rows)).view(t.dtype)
    if t.stride(1) != 1:
        return t.contiguous()
    return t if t.element_size() > 1 or copyable(t) else t.clone(memory_format=torch.contiguous_format)


def _lines(t: Tensor) -> Tensor:
    """Scales without gaps, from a multiple of 16 bytes on."""
    return _at_16_bytes(t.contiguous())


def _at_16_bytes(t: Tensor) -> Tensor:
    return t if copyable(t) else t.clone()


@functools.cache
def takes(device: int, scaling: Scaling) -> bool:
    """Does `torch._scaled_mm` multiply operands of this scaling on this GPU, for results of bf16 and of float32?"""
    if scaling is Scaling.OTHER or not torch.cuda.is_available():
        return False
    unit = _UNITS[scaling]
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        left, right = (
            torch.zeros(rows, unit.k, device=f"cuda:{device}").to(torch.float8_e4m3fn) for rows in (unit.m, unit.n)
        )
        of_a, of_b = (
            layout.empty(q.shape[0], q.shape[1], q.device).fill_(1.0)
            for layout, q in zip(scaling.layouts, (left, right), strict=True)
        )
        try:
            for dtype in (torch.bfloat16, torch.float32):
                torch._scaled_mm(left, right.mT, *scales_for(scaling, of_a, of_b, left, right), out_dtype=dtype)
        except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
            logger.debug("torch._scaled_mm refuses %s scales here: %s", scaling.name, error)
            return False
    return True
