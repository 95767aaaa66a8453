"""Scaled products by cuBLASLt, through `torch._scaled_mm`.

It takes K-major operands, sizes in multiples of 16 and complete blocks of scales; this module pads others with zeros.
Operands and scales must begin at multiples of 16 bytes; slices that do not (the scale of row 19 is at byte 76) are
copied.  What else it takes differs between versions and GPUs, so each scaling is tried once, on a small product.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from tilewright.log import logger
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of


class _Units(NamedTuple):
    """Sizes must be multiples of these."""

    m: int
    n: int
    k: int


# Versions disagree about the pitch of 128x128 scales along K, unless the number of blocks is a multiple of four
_UNITS = {
    Scaling.TENSOR: _Units(16, 16, 16),
    Scaling.ROW: _Units(16, 16, 16),
    Scaling.TOKEN_BLOCK: _Units(16, 128, 512),
    Scaling.TOKEN_TOKEN: _Units(16, 128, 128),
}


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns (a * scale_a) @ (b * scale_b) of e4m3 a (M, K), b (K, N), rounded once; scale_b is of b.mT.

    Returns None if cuBLAS does not support the device, the GPU or the scaling.
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
    result = torch._scaled_mm(left, right.mT, *scales, out_dtype=dtype, use_fast_accum=False)
    return result if result.shape == (m, n) else result[:m, :n].contiguous()


def scales_for(
    scaling: Scaling, scale_a: Tensor, scale_b: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns both scales as `torch._scaled_mm` takes them with the padded operands left (M, K) and right (N, K): 1x128
    scales without a gap along rows, others contiguous, scale_b transposed, (K blocks, N blocks).
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
    """Returns `t` (R, C) padded with zeros to multiples of `rows` and `columns`, contiguous along C.

    No copy if it is so already and its rows are aligned to 16 bytes (`scales_for` aligns scales).
    """
    more_rows, more_columns = -t.shape[0] % rows, -t.shape[1] % columns
    if more_rows or more_columns:  # as bytes: torch pads no float8
        raw = t.view(torch.uint8) if t.element_size() == 1 else t
        return pad(raw, (0, more_columns, 0, more_rows)).view(t.dtype)
    if t.stride(1) != 1:
        return t.contiguous()
    return t if t.element_size() > 1 or copyable(t) else t.clone(memory_format=torch.contiguous_format)


def _lines(t: Tensor) -> Tensor:
    """Returns contiguous scales, aligned to 16 bytes."""
    return _at_16_bytes(t.contiguous())


def _at_16_bytes(t: Tensor) -> Tensor:
    return t if copyable(t) else t.clone()


@functools.cache
def takes(device: int, scaling: Scaling) -> bool:
    """Returns whether `torch._scaled_mm` supports this scaling on this GPU, with bf16 and with float32 results."""
    if scaling is Scaling.OTHER or not torch.cuda.is_available():
        return False
    unit = _UNITS[scaling]
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        left, right = (
            torch.zeros(rows, unit.k, device=f"cuda:{device}").to(torch.float8_e4m3fn) for rows in (unit.m, unit.n)
        )
        scale_a, scale_b = (
            layout.empty(q.shape[0], q.shape[1], q.device).fill_(1.0)
            for layout, q in zip(scaling.layouts, (left, right), strict=True)
        )
        try:
            for dtype in (torch.bfloat16, torch.float32):
                torch._scaled_mm(left, right.mT, *scales_for(scaling, scale_a, scale_b, left, right), out_dtype=dtype)
        except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
            logger.debug("torch._scaled_mm refuses %s scales here: %s", scaling.name, error)
            return False
    return True
