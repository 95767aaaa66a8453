"""Arguments of the raw op from those of a public call."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily

from tilewright.errors import InputError
from tilewright.mask import Mask, causal
from tilewright.ops.attention.layout import readable
from tilewright.ops.attention.score import Scores

_CAUSAL = causal()


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


def raw_arguments(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, scores: Scores
) -> tuple[Any, ...]:
    """Arguments of the raw op for tensors that passed `check_heads`."""
    if scale is None:
        scale = float(q.shape[-1]) ** -0.5 if q.shape[-1] else 1.0
    program, data, left, right = _mask(mask, q, k)
    return (
        readable(q),
        readable(k),
        readable(v),
        _of_heads(scores.sinks, q),
        _of_heads(scores.slopes, q),
        data,
        program,
        left,
        right,
        float(scale) if isinstance(scale, int) else scale,
        scores.softcap,
    )


def _mask(mask: Mask | None, q: Tensor, k: Tensor) -> tuple[str, Tensor | None, int, int]:
    """(program, data, left, right); a mask that is a band has program "" and no data."""
    if mask is None:
        return "", None, -1, -1
    mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    band = mask.band()
    if band is not None:
        return "", None, *band
    sizes = q.shape[2], k.shape[2]
    if _without_values(q):
        with unset_fake_temporarily():
            text, data = mask.fitted_program(*sizes, torch.device("cpu"))
        return text, q.new_empty(data.shape, dtype=data.dtype), -1, -1
    return *mask.fitted_program(*sizes, q.device), -1, -1


def _without_values(q: Tensor) -> bool:
    """True if only sizes matter, as in `explain` and the tuner; masks and modifiers then hold real tensors."""
    return q.is_meta or (not torch.compiler.is_compiling() and is_fake(q))


def _of_heads(t: Tensor | None, q: Tensor) -> Tensor | None:
    """`t` (H,) contiguous, widened to at least float32."""
    if t is None:
        return None
    if _without_values(q):
        return q.new_empty(t.shape, dtype=torch.float64 if t.dtype == torch.float64 else torch.float32)
    return (t if t.dtype == torch.float64 else t.float()).contiguous()
