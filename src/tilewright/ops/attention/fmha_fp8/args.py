"""Arguments of the raw op of `fmha_fp8`, from those of a public call, and its bucket."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.mask import Mask, window
from tilewright.ops.attention import arguments
from tilewright.ops.attention.arguments import FmhaArgs, MaskArgs
from tilewright.ops.attention.bucket import forward_bucket
from tilewright.ops.attention.score import split

BLOCKS_Q, BLOCKS_K, BLOCKS_V = 1, 2, 4
"""Bits of `blocks` in a bucket: these scales change along the sequence."""


class FmhaFp8Args(NamedTuple):
    """Arguments of the forward."""

    q: Tensor  # (B, H, S_q, D) e4m3, unit last stride, as k and v
    k: Tensor  # (B, H_kv, S_k, D)
    v: Tensor  # (B, H_kv, S_k, D_v)
    q_scale: Tensor  # (B, H, blocks) float32: 1, or one for each 128 tokens; H of its operand
    k_scale: Tensor
    v_scale: Tensor
    sinks: Tensor | None  # (H,) float32
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float
    softcap: float  # 0: none
    out_dtype: torch.dtype

    @property
    def mask(self) -> MaskArgs:
        """The four fields of the mask."""
        return MaskArgs(self.mask_data, self.program, self.left, self.right)


class FmhaFp8Bucket(NamedTuple):
    """The tuning key; fields as in `FmhaBucket`, and the bits of `BLOCKS_*`."""

    BH: int
    group: int
    S_q: int
    S_k: int
    D: int
    D_v: int
    mask: int
    extras: int
    aligned: int
    blocks: int


class Options(NamedTuple):
    """The public call's arguments after tensors of operands and scales, but for layout and what it returns."""

    causal: bool
    window: tuple[int, int] | None
    mask: Mask | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    out_dtype: torch.dtype


def raw_arguments(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, options: Options
) -> FmhaFp8Args:
    """Arguments of the raw op for tensors that passed `check_dimensions`, q, k and v as (B, H, S, D)."""
    merged_mask = merged(options.mask, options.causal, options.window)
    if merged_mask is not None and merged_mask.only_flex:
        raise InputError(
            "fmha_fp8: the mask is a BlockMask with a function of its own, which no kernel here can evaluate."
        )
    plain = arguments.raw_arguments(
        q, k, v, merged_mask, options.scale, split("fmha_fp8", None, options.softcap, options.sinks)
    )
    q_scale, k_scale, v_scale = (t if t.dim() == 3 else t.unsqueeze(-1) for t in (q_scale, k_scale, v_scale))
    return FmhaFp8Args(
        plain.q, plain.k, plain.v, q_scale, k_scale, v_scale, plain.sinks, *plain.mask, plain.scale, plain.softcap,
        options.out_dtype,
    )  # fmt: skip


def bucket(args: FmhaFp8Args) -> FmhaFp8Bucket:
    """The bucket of a call."""
    scales = {BLOCKS_Q: args.q_scale, BLOCKS_K: args.k_scale, BLOCKS_V: args.v_scale}
    blocks = sum(bit for bit, t in scales.items() if t.shape[2] > 1)
    plain = FmhaArgs(args.q, args.k, args.v, args.sinks, None, *args.mask, args.scale, args.softcap)
    return FmhaFp8Bucket(*forward_bucket(plain), blocks)


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
