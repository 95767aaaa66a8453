"""How the problems of optimizers are drawn: the weight of a layer, its dtype and its states."""

from __future__ import annotations

import torch
from any_size_draw import Draw, Model, Sizes
from any_size_parts import floating, half, layer, product_cost


def adamw(draw: Draw, model: Model) -> Sizes:
    """A layer's weight in one dtype, with a float32 master, or with everything in bf16."""
    part, n, k = layer(draw, model)
    kind = draw.pick(("plain", "master", "rounded"))
    params = {"shape": (n, k), "rate": True}
    if kind == "master":
        return Sizes(part, {**params, "master": True}, half(draw), elements=9 * n * k)
    if kind == "rounded":
        return Sizes(part, {**params, "state": torch.bfloat16, "seed": 1}, torch.bfloat16, elements=7 * n * k)
    return Sizes(part, params, floating(draw), elements=7 * n * k)


def adamw_8bit(draw: Draw, model: Model) -> Sizes:
    """A layer's weight in one dtype, with a float32 master, or rounded at random."""
    part, n, k = layer(draw, model)
    kind = draw.pick(("plain", "master", "rounded"))
    params = {"shape": (n, k), "rate": True}
    if kind == "master":
        return Sizes(part, {**params, "master": True}, half(draw), elements=6 * n * k)
    if kind == "rounded":
        return Sizes(part, {**params, "seed": 1}, torch.bfloat16, elements=4 * n * k)
    return Sizes(part, params, floating(draw), elements=4 * n * k)


def grad_norm(draw: Draw, model: Model) -> Sizes:
    """The gradient of a layer's weight."""
    part, n, k = layer(draw, model)
    return Sizes(part, {"shape": (n, k)}, floating(draw), elements=n * k)


def symmetric_matmul(draw: Draw, model: Model) -> Sizes:
    """The Gram matrix of a layer's weight by its shorter side, and a polynomial of one."""
    part, n, k = layer(draw, model)
    m, k = min(n, k), max(n, k)
    if draw.chance(0.5):
        return Sizes(part, {"M": m, "K": m, "c": True, "alpha": 2.0, "beta": -4.8}, half(draw), **product_cost(m, m, m))
    return Sizes(part, {"M": m, "K": k}, half(draw), **product_cost(m, m, k))
