"""Masks of one decode step, built once a step and shared by every layer of a kind.

A query at position p sees positions [max(first, p - window + 1), p]. Two forms of this rule:
  interval   (B, 1, 1, 2) int64, the two bounds: for a kernel that reads only those keys
  additive   (B, 1, 1, slots), 0 or -inf: for dense attention over the visible slots
Both are 4-D: Transformers passes a 4-D `attention_mask` to attention unchanged and builds no other mask.
"""

import torch

from tilewright.generate.cache import Cursor


def interval(cursor: Cursor, window: int | None) -> torch.Tensor:
    """Bounds, both inclusive: (B, 1, 1, 2) int64."""
    lower = cursor.first
    if window is not None:
        lower = torch.maximum(lower, cursor.position - (window - 1))
    return torch.stack((lower, cursor.position.expand_as(lower)), dim=-1)[:, None, None]


def additive(cursor: Cursor, window: int | None, *, capacity: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a slot may be seen, -inf elsewhere: (B, 1, 1, min(visible, capacity)) in `dtype`.

    Slot s holds the latest position that is congruent to it: p - (p - s) mod capacity, negative if nothing was written
    yet. For a layer that is no ring this is s itself up to p, and negative beyond.
    """
    slots = torch.arange(min(cursor.visible, capacity), device=cursor.position.device)
    slot_position = cursor.position - (cursor.position - slots).remainder_(capacity)  # (slots,)
    visible = slot_position >= cursor.first[:, None]  # (B, slots)
    if window is not None:
        visible &= slot_position > cursor.position - window
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return mask[:, None, None]
