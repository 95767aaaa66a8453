"""The reference of `apply_rope` in plain torch, with the rounding of the models."""

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch; equals the Hugging Face functions bit for bit."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = (_expand_table(t, rotary_dim or t.shape[-1], interleaved).unsqueeze(1) for t in (cos, sin))
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _expand_table(table: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """(..., W) -> (..., R): one column for each element instead of each pair."""
    if interleaved:
        return table[..., : rotary_dim // 2].repeat_interleave(2, dim=-1)
    return table if table.shape[-1] == rotary_dim else torch.cat((table, table), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    r = cos.shape[-1]
    rotary, tail = x[..., :r], x[..., r:]
    if interleaved:
        rotated_half = torch.stack((-rotary[..., 1::2], rotary[..., 0::2]), dim=-1).flatten(-2)
    else:
        rotated_half = torch.cat((-rotary[..., r // 2 :], rotary[..., : r // 2]), dim=-1)
    rotated = (rotary * cos + rotated_half * sin).to(x.dtype)
    return torch.cat((rotated, tail), dim=-1) if r < x.shape[-1] else rotated
