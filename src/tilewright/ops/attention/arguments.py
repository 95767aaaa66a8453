"""Arguments of the raw ops of `fmha` and `fmha_varlen`, which the other ops of this family share in part.

A mask travels as one value, `MaskArgs`; torch's schema, which has no records, lists its fields one by one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily

from tilewright.dispatch.arguments import Size
from tilewright.errors import InputError
from tilewright.mask import Mask, causal
from tilewright.ops.attention.layout import readable
from tilewright.ops.attention.score import Scores

_CAUSAL = causal()


class MaskArgs(NamedTuple):
    """A mask as kernels take it: a band, or a program with its numbers.  Its fields stand together in every schema."""

    mask_data: Tensor | None  # int32: the numbers of the program
    program: str  # "" for a band
    left: int  # keys before its position that a query sees; -1: no limit
    right: int  # keys after it

    def clamped_band(self, s_q: int, s_k: int) -> tuple[int, int]:
        """(left, right) clamped to the largest distance between s_q queries and s_k keys; -1 stays unlimited.

        A bound plus a position then stays in int32.
        """
        return min(self.left, s_q + s_k), min(self.right, s_q + s_k)


EVERYTHING = MaskArgs(None, "", -1, -1)
"""The mask under which every query sees every key."""


class FmhaArgs(NamedTuple):
    """Arguments of the forward."""

    q: Tensor  # (B, H, S_q, D), unit last stride, as k and v
    k: Tensor  # (B, H_kv, S_k, D)
    v: Tensor  # (B, H_kv, S_k, D_v)
    sinks: Tensor | None  # (H,) float32
    slopes: Tensor | None  # (H,) float32, of ALiBi
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float
    softcap: float  # 0: none

    @property
    def mask(self) -> MaskArgs:
        """The four fields of the mask."""
        return MaskArgs(self.mask_data, self.program, self.left, self.right)


class VarlenArgs(NamedTuple):
    """Arguments of the forward of `fmha_varlen`: those of `fmha` under a mask of packed sequences, and their number."""

    q: Tensor  # (1, H, T_q, D), unit last stride, as k and v
    k: Tensor  # (1, H_kv, T_k, D)
    v: Tensor  # (1, H_kv, T_k, D_v)
    sinks: Tensor | None  # (H,) float32
    slopes: Tensor | None  # (H,) float32, of ALiBi
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float
    softcap: float  # 0: none
    sequences: Size

    @property
    def mask(self) -> MaskArgs:
        """The four fields of the mask."""
        return MaskArgs(self.mask_data, self.program, self.left, self.right)

    @property
    def fmha(self) -> FmhaArgs:
        """The same as one attention."""
        operands = self.q, self.k, self.v, self.sinks, self.slopes
        return FmhaArgs(*operands, *self.mask, self.scale, self.softcap)


class FmhaBackwardArgs(NamedTuple):
    """Arguments of the backward: the gradients of both results, then the forward's tensors and results."""

    do: Tensor  # (B, H, S_q, D_v)
    dlse: Tensor | None  # (B, H, S_q) float32
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor  # (B, H, S_q, D_v)
    lse: Tensor  # (B, H, S_q) float32
    sinks: Tensor | None
    slopes: Tensor | None
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float
    softcap: float

    @property
    def mask(self) -> MaskArgs:
        """The four fields of the mask."""
        return MaskArgs(self.mask_data, self.program, self.left, self.right)

    @property
    def forward(self) -> FmhaArgs:
        """The arguments of the forward."""
        return FmhaArgs(self.q, self.k, self.v, self.sinks, self.slopes, *self.mask, self.scale, self.softcap)


def merged(op: str, mask: Any, is_causal: bool) -> Mask | None:
    """The intersection of the two arguments, or None if everything is allowed."""
    if mask is None:
        return _CAUSAL if is_causal else None
    if not isinstance(mask, Mask):
        raise InputError(
            f"{op}: mask is a {type(mask).__name__}; needs one of tilewright.mask, say causal() & window(4096), or "
            "from_block_mask(...) for torch's BlockMask."
        )
    return mask & _CAUSAL if is_causal else mask


def raw_arguments(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, scores: Scores) -> FmhaArgs:
    """Arguments of the raw op for tensors that passed `check_heads`."""
    if scale is None:
        scale = float(q.shape[-1]) ** -0.5 if q.shape[-1] else 1.0
    return FmhaArgs(
        readable(q),
        readable(k),
        readable(v),
        of_heads(scores.sinks, q),
        of_heads(scores.slopes, q),
        *mask_arguments(mask, q, k),
        float(scale) if isinstance(scale, int) else scale,
        scores.softcap,
    )


def mask_arguments(mask: Mask | None, q: Tensor, k: Tensor) -> MaskArgs:
    """`mask` for q (B, H, S_q, D) and k (B, H_kv, S_k, D)."""
    if mask is None:
        return EVERYTHING
    mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    band = mask.band()
    if band is not None:
        return MaskArgs(None, "", *band)
    sizes = q.shape[2], k.shape[2]
    if _without_values(q):
        with unset_fake_temporarily():
            program, data = mask.fitted_program(*sizes, torch.device("cpu"))
        return MaskArgs(q.new_empty(data.shape, dtype=data.dtype), program, -1, -1)
    program, data = mask.fitted_program(*sizes, q.device)
    return MaskArgs(data, program, -1, -1)


def _without_values(q: Tensor) -> bool:
    """True if only sizes matter, as in `explain` and the tuner; masks and modifiers then hold real tensors."""
    return q.is_meta or (not torch.compiler.is_compiling() and is_fake(q))


def of_heads(t: Tensor | None, q: Tensor) -> Tensor | None:
    """`t` (H,) contiguous, widened to at least float32."""
    if t is None:
        return None
    if _without_values(q):
        return q.new_empty(t.shape, dtype=torch.float64 if t.dtype == torch.float64 else torch.float32)
    return (t if t.dtype == torch.float64 else t.float()).contiguous()
