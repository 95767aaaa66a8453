"""Arguments of the raw op from those of a public call of `fmha_fp8`."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.mask import Mask, window
from tilewright.ops.attention import arguments
from tilewright.ops.attention.score import split


def raw_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    causal: bool,
    sides: tuple[int, int] | None,
    mask: Any,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Any, ...]:
    """Arguments of the raw op for tensors that passed `check_dimensions`, q, k and v as (B, H, S, D)."""
    merged_mask = merged(mask, causal, sides)
    if merged_mask is not None and merged_mask.only_flex:
        raise InputError(
            "fmha_fp8: the mask is a BlockMask with a function of its own, which no kernel here can evaluate."
        )
    q, k, v, sinks, _, *band_and_scale = arguments.raw_arguments(
        q, k, v, merged_mask, scale, split("fmha_fp8", None, softcap, sinks)
    )
    scales = (t if t.dim() == 3 else t[..., None] for t in (q_scale, k_scale, v_scale))
    return q, k, v, *scales, sinks, *band_and_scale, out_dtype


def merged(mask: Any, causal: bool, sides: Any) -> Mask | None:
    """The intersection of the three arguments, or None if everything is allowed."""
    merged_mask = arguments.merged("fmha_fp8", mask, causal)
    if sides is None:
        return merged_mask
    band = _window(sides)
    return band if merged_mask is None else merged_mask & band


def _window(sides: Any) -> Mask:
    """The window (left, right), -1 for no limit."""
    if not isinstance(sides, tuple) or len(sides) != 2 or any(type(n) is not int or n < -1 for n in sides):
        raise InputError(f"fmha_fp8: window is {sides!r}; needs (left, right), numbers of keys, -1 for no limit.")
    left, right = (None if n < 0 else n for n in sides)
    return window(left, right)
