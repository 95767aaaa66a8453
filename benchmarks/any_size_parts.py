"""What recipes draw from a model: rows, dtypes, linear layers, experts."""

from __future__ import annotations

from typing import Any

import torch
from any_size_draw import BF16, FP16, FP32, Draw, Model

DECODE_MOST = 64
ODD = (67, 97, 127, 251, 333, 509, 777, 1021, 1500, 2000, 2039, 3001, 4093, 5000, 8191, 10007, 16381, 30011)
POWERS = tuple(1 << exponent for exponent in range(7, 17))


def floating(draw: Draw) -> torch.dtype:
    """bf16 in six of ten, fp16 and fp32 in two each."""
    return draw.pick((BF16,) * 6 + (FP16,) * 2 + (FP32,) * 2)


def half(draw: Draw) -> torch.dtype:
    """bf16, and fp16 in one of four."""
    return draw.pick((BF16, BF16, BF16, FP16))


def tokens(draw: Draw) -> int:
    """Rows: of decoding in 35 of 100, odd in 30, a power of two in 35."""
    kind = draw.below(100)
    if kind < 35:
        return decoded(draw)
    return draw.pick(ODD if kind < 65 else POWERS)


def decoded(draw: Draw) -> int:
    """Rows of decoding: a sequence in one of four, up to 64 otherwise."""
    return 1 if draw.chance(0.25) else draw.between(2, DECODE_MOST)


def part_of(draw: Draw, width: int) -> int:
    """A width divided among 1, 2, 4 or 8 GPUs, where it divides: one in half of all draws."""
    ranks = draw.pick((1, 1, 1, 2, 4, 8))
    return width // ranks if width % ranks == 0 else width


def layer(draw: Draw, model: Model) -> tuple[str, int, int]:
    """(part, N, K) of a linear layer, y (M, N) = x (M, K) @ w (N, K)^T."""
    hidden, d = model.hidden, model.head_dim
    inner = part_of(draw, model.intermediate)
    heads = part_of(draw, model.heads)
    layers = [
        ("qkv", (heads + 2 * max(model.kv_heads * heads // model.heads, 1)) * d, hidden),
        ("o", hidden, heads * d),
        ("up", inner, hidden) if model.dense_mlp else ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("lm_head", part_of(draw, model.vocab), hidden),
    ]
    if model.experts:
        layers.append(("router", model.experts, hidden))
    if model.kv_lora:
        query_width = model.q_lora or hidden
        layers += [
            ("kv_a", model.kv_lora + model.rope_dim, hidden),
            ("kv_b", heads * 2 * d, model.kv_lora),
            ("q_b", heads * (d + model.rope_dim), query_width),
        ]
    found: tuple[str, int, int] = draw.pick(layers)
    return found


def expert(draw: Draw, model: Model) -> tuple[str, int, int, int] | None:
    """(part, G, N, K) of the experts on one GPU; None for a dense model."""
    if not model.experts:
        return None
    groups = model.experts // draw.pick((1, 2, 4, 8))
    hidden, inner = model.hidden, model.expert_intermediate
    part, n, k = draw.pick((("experts_gate_up", 2 * inner, hidden), ("experts_down", hidden, inner)))
    return part, max(groups, 1), n, k


def product_cost(m: int, n: int, k: int, batch: int = 1) -> dict[str, Any]:
    """Flops and elements of the products A (M, K) times B (K, N) of a batch."""
    return {"flops": 2.0 * batch * m * n * k, "elements": batch * (m * k + n * k + m * n)}
