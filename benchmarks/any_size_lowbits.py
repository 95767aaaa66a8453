"""How the problems of few bits are drawn: integers with scales of rows or groups, and scales of short blocks."""

from __future__ import annotations

from typing import Any

import torch
from any_size_draw import TRAINING_ROWS, Draw, Model, Sizes
from any_size_parts import decoded, floating, half, layer, part_of, product_cost, tokens


def weight_only_matmul(draw: Draw, model: Model) -> Sizes:
    """Few rows in four of five: what such weights are for."""
    part, n, k = layer(draw, model)
    m = decoded(draw) if draw.chance(0.8) else tokens(draw)
    return Sizes(part, {"M": m, "N": n, "K": k, "bits": draw.pick((8, 4))}, half(draw), **product_cost(m, n, k))


def quantize_weight(draw: Draw, model: Model) -> Sizes:
    """A layer's weight, to 8 or 4 bits."""
    part, n, k = layer(draw, model)
    options = draw.pick(({}, {"bits": 4}))
    return Sizes(part, {"N": n, "K": k, **options}, floating(draw), elements=4 * n * k)


def dequantize_weight(draw: Draw, model: Model) -> Sizes:
    """A layer's weight, from 8 or 4 bits."""
    part, n, k = layer(draw, model)
    return Sizes(part, {"N": n, "K": k}, draw.pick((torch.int8, torch.uint8)), elements=2 * n * k)


def block_matmul(draw: Draw, model: Model) -> Sizes:
    """Few rows in four of five, by weights with scales of short blocks."""
    part, n, k = layer(draw, model)
    m = decoded(draw) if draw.chance(0.8) else tokens(draw)
    sizes = {"M": m, "N": n, "K": k // 32 * 32, "format": draw.pick(("mxfp4", "nvfp4", "mxfp8"))}
    return Sizes(part, sizes, torch.bfloat16, **product_cost(m, n, k))


def cast_to_blocks(draw: Draw, model: Model) -> Sizes:
    """A layer's weight, to 4 or 8 bits."""
    part, n, k = layer(draw, model)
    sizes = {"M": n, "N": k // 32 * 32, "format": draw.pick(("mxfp4", "nvfp4", "mxfp8"))}
    return Sizes(part, sizes, floating(draw), elements=4 * n * k)


def dequantize_blocks(draw: Draw, model: Model) -> Sizes:
    """A layer's weight, from 4 or 8 bits."""
    part, n, k = layer(draw, model)
    sizes = {"M": n, "N": k // 32 * 32, "format": draw.pick(("mxfp4", "nvfp4", "mxfp8"))}
    return Sizes(part, sizes, torch.uint8, elements=4 * n * k)


def int8_matmul(draw: Draw, model: Model) -> Sizes:
    """Activations times weights, both int8."""
    part, n, k = layer(draw, model)
    m = tokens(draw)
    options: dict[str, Any] = {"bias": True} if part == "qkv" and model.qkv_bias else {}
    if part == "gate_up" and draw.chance(0.3):
        options["activation"] = "swiglu"
    return Sizes(part, {"M": m, "N": n, "K": k, **options}, torch.int8, **product_cost(m, n, k))


def per_token_cast_to_int8(draw: Draw, model: Model) -> Sizes:
    """Activations before a layer, or between the layers of an MLP."""
    m, n = tokens(draw), draw.pick((model.hidden, part_of(draw, model.intermediate)))
    options = draw.pick(({}, {}, {"smooth": True}))
    return Sizes("activations", {"M": m, "N": n, **options}, floating(draw), 2 * m * n)


def hadamard_transform(draw: Draw, model: Model) -> Sizes:
    """Activations before a rotated layer: the next size that has a matrix."""
    m, n = tokens(draw), draw.pick((model.hidden, part_of(draw, model.intermediate)))
    return Sizes("activations", {"M": m, "N": min(n, 32768)}, floating(draw), 2 * m * n, trained=m >= TRAINING_ROWS)
