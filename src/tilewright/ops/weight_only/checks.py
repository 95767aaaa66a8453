"""Checks shared by the ops on quantised weights: InputError before any launch."""

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.weight_only import packing

RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def check_weight(op: str, q: Tensor, scales: Tensor) -> None:
    """Checks q (N, K) int8 or (N, K / 2) uint8, and scales (N, ceil(K / 128)) on its device."""
    for name, t in (("q", q), ("scales", scales)):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
    if q.dtype not in (torch.int8, torch.uint8):
        raise InputError(
            f"{op}: q is {q.dtype}; needs int8, or uint8 of two 4-bit elements. quantize_weight makes both."
        )
    if q.dim() != 2:
        raise InputError(f"{op}: q is {tuple(q.shape)}; needs (N, K), or (N, K / 2) of 4 bits.")
    if scales.dtype not in (*packing.SCALES, torch.float64):
        raise InputError(f"{op}: scales is {scales.dtype}; needs bfloat16, float16 or float32.")
    depth = packing.depth_of(q)
    expected = q.shape[0], packing.groups(depth)
    if tuple(scales.shape) != expected:
        raise InputError(
            f"{op}: scales is {tuple(scales.shape)}; needs {expected} for q {tuple(q.shape)} of "
            f"{packing.bits_of(q)} bits, K={depth}: one for each {packing.GROUP} elements of a row."
        )
    if scales.device != q.device:
        raise InputError(f"{op}: q is on {q.device}, scales on {scales.device}. Move them to one device.")


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    """Checks for a dtype that results may have."""
    if dtype not in RESULTS:
        raise InputError(f"{op}: {name} is {dtype}; allowed are bfloat16, float16 and float32.")
