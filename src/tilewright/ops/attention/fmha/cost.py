"""What an attention must compute and move: products of the pairs that its mask allows."""

import torch
from torch import Tensor

from tilewright.dispatch import Cost, Sample
from tilewright.mask import Mask, evaluate
from tilewright.ops import rows
from tilewright.ops.attention.arguments import merged

_BLOCK = 1 << 26  # pairs looked at in one go


def cost(sample: Sample, direction: str) -> Cost:
    """Forward: two products, QK^T and PV; reads q, k, v, writes o and lse.  Backward: five, QK^T again, dO V^T, P^T dO,
    dS^T Q and dS K; reads these tensors and do, writes the three gradients.
    """
    q, k, v = (t.transpose(1, 2) if sample.kwargs.get("layout") == "BSHD" else t for t in sample.args[:3])
    d, d_v = q.shape[3], v.shape[3]
    count = pairs(q, k, merged("fmha", sample.kwargs.get("mask"), bool(sample.kwargs.get("causal"))))
    per_row = q.numel() // d
    output_bytes = per_row * (d_v * q.element_size() + 4)
    inputs = rows.nbytes(q, k, v)
    if direction == "fwd":
        return Cost(2 * count * (d + d_v), inputs, output_bytes)
    return Cost(2 * count * (3 * d + 2 * d_v), inputs + output_bytes + per_row * d_v * q.element_size(), inputs)


def pairs(q: Tensor, k: Tensor, mask: Mask | None) -> int:
    """How many (query, key) pairs are allowed, over batch and heads.  q: (B, H, S_q, D)   k: (B, H_kv, S_k, D)"""
    (batch, heads, s_q, _), s_k = q.shape, k.shape[2]
    band = (-1, -1) if mask is None else mask.band()
    if band is not None:
        left, right = band
        positions = torch.arange(s_k - s_q, s_k)
        last = (positions + right).clamp(-1, s_k - 1) if right >= 0 else torch.full_like(positions, s_k - 1)
        first = (positions - left).clamp(0, s_k) if left >= 0 else torch.zeros_like(positions)
        return batch * heads * int((last - first + 1).clamp_min(0).sum())
    assert mask is not None, "no mask is a band"
    program, data = mask.program(q.device)
    keys = torch.arange(s_k, device=q.device)
    height = max(_BLOCK // max(batch * heads * s_k, 1), 1)
    total = 0
    for start in range(0, s_q, height):
        positions = torch.arange(start, min(start + height, s_q), device=q.device) + (s_k - s_q)
        visible = evaluate(program, data, positions, keys, batch, heads)
        total += int(visible.sum()) * (batch // visible.shape[0]) * (heads // visible.shape[1])
    return total
