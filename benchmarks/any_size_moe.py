"""Recipes of mixtures of experts: routers, the order of tokens, and the experts of one GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from any_size_draw import FP32, Draw, Model, Sizes
from any_size_parts import floating, half, tokens
from torch import int32, int64


def topk_softmax(draw: Draw, model: Model) -> Sizes | None:
    """A router's logits, renormalised or not."""
    if not model.experts:
        return None
    m, n = tokens(draw), model.experts
    params: dict[str, Any] = {"M": m, "N": n, "K": model.top_k, "renormalize": draw.chance(0.7)}
    return Sizes("router", params, floating(draw), m * n)


def topk_sigmoid(draw: Draw, model: Model) -> Sizes | None:
    """The same with a bias, in groups where the experts divide into eight."""
    if not model.experts:
        return None
    m, n = tokens(draw), model.experts
    params: dict[str, Any] = {"M": m, "N": n, "K": model.top_k, "bias": True, "scale": 2.5}
    if n % 8 == 0 and n >= 64 and draw.chance(0.5):
        params |= {"n_group": 8, "topk_group": 4}
    return Sizes("router", params, FP32, m * n)


def moe_align(draw: Draw, model: Model) -> Sizes | None:
    """Experts of tokens, some dropped in one of four."""
    if not model.experts:
        return None
    m, k = tokens(draw), model.top_k
    params: dict[str, Any] = {"M": m, "E": model.experts, "K": k, "dropped": draw.chance(0.25)}
    return Sizes("order", params, draw.pick((int64, int64, int32)), 3 * m * k)


def moved_rows(draw: Draw, model: Model) -> Sizes | None:
    """Rows to their experts, or back."""
    if not model.experts:
        return None
    m, n, k = tokens(draw), model.hidden, model.top_k
    params = {"M": m, "N": n, "E": model.experts, "K": k}
    return Sizes("rows", params, floating(draw), m * n * (k + 1))


def fused_moe(draw: Draw, model: Model) -> Sizes | None:
    """The experts of one GPU of 1, 2, 4 or 8, each with its share of the tokens' choices."""
    if not model.experts:
        return None
    experts = max(model.experts // draw.pick((1, 2, 4, 8)), model.top_k)
    m, k, h, i = tokens(draw), model.top_k, model.hidden, model.expert_intermediate
    params = {"M": m, "E": experts, "K": k, "H": h, "I": i}
    elements = 3 * experts * h * i + 2 * m * h
    return Sizes("experts", params, half(draw), flops=6.0 * m * k * h * i, elements=elements)


def fused_moe_bias(draw: Draw, model: Model) -> Sizes | None:
    """The same with biases, gates beside ups or before them, weights along either dimension."""
    sizes = fused_moe(draw, model)
    if sizes is None:
        return None
    params = {**sizes.params, "interleaved": draw.chance(0.5), "transposed": draw.chance(0.5)}
    return replace(sizes, params=params)
