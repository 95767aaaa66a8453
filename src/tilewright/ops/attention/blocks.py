"""Shared by the references of attention: blocks of queries, products of grouped heads, masks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.mask import evaluate
from tilewright.ops.attention.arguments import MaskArgs


def row_blocks(q: Tensor, s_k: int, most: int) -> Iterator[tuple[int, int]]:
    """Queries start .. end of q (B, H, S_q, D), with at most `most` scores or one row at a time; none of no queries."""
    s_q = q.shape[2]
    a_row = hint(q.shape[0] * q.shape[1] * s_k)
    # One block also where nothing is computed (meta); and no guard here but on a size that is none
    if q.is_meta or a_row * hint(s_q) <= most:
        if s_q:
            yield 0, s_q
        return
    height = max(most // a_row, 1)
    for start in range(0, s_q, height):
        yield start, min(start + height, s_q)


def allowed(positions: Tensor, keys: Tensor, mask: MaskArgs, batch: int, heads: int) -> Tensor | None:
    """bool, broadcastable to (B, H, positions, keys), by the program or else the band; None: everything is allowed."""
    left, right = mask.left, mask.right
    if mask.mask_data is not None:
        return evaluate(mask.program, mask.mask_data, positions, keys, batch, heads)
    if left < 0 and right < 0:
        return None
    distance = positions[:, None] - keys
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (distance >= -right)
    return visible


def products(a: Tensor, b: Tensor) -> Tensor:
    """a (B, H, M, K) @ b (B, H_kv, K, N): the query heads of one kv head are stacked as rows of one product."""
    batch, heads, m, _ = a.shape
    folded = a.reshape(batch, b.shape[1], heads // b.shape[1] * m, a.shape[3])
    return (folded @ b).view(batch, heads, m, b.shape[3])
