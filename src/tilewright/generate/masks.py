"""Masks of one decode step, built once a step and shared by every layer of a kind.

A query at position p sees positions [max(first, p - window + 1), p]. Two forms of this rule:
  lengths    (B, 1, 1, 1) int32, how many slots of each row hold them, from the first one on: for `fmha_decode`
  additive   (B, 1, 1, slots), 0 or -inf: for dense attention over the visible slots
Both are 4-D: Transformers passes a 4-D `attention_mask` to attention unchanged and builds no other mask.
"""

import torch

from tilewright.generate.cache import Cursor


def lengths(cursor: Cursor, window: int | None) -> torch.Tensor:
    """Numbers of slots in a cache whose rows have positions of their own: (B, 1, 1, 1) int32."""
    slots = cursor.lengths if window is None or cursor.ring is None else cursor.ring_lengths
    return slots[:, None, None, None]


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
