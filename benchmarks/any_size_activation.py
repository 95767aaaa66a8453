"""How the problems of gates and of whole MLPs are drawn, for `any_size_recipes.py`."""

from __future__ import annotations

from any_size_draw import TRAINING_ROWS, Draw, Model, Sizes
from any_size_parts import floating, half, part_of, product_cost, tokens


def inner(draw: Draw, model: Model) -> tuple[str, int]:
    """(part, N) of an MLP, or of an expert."""
    if model.experts and draw.chance(0.5):
        return "expert", model.expert_intermediate
    return "mlp", part_of(draw, model.intermediate)


def activation(draw: Draw, model: Model) -> Sizes:
    """Gate and up of an MLP."""
    (part, n), m = inner(draw, model), tokens(draw)
    return Sizes(part, {"M": m, "N": n}, floating(draw), 3 * m * n, trained=m >= TRAINING_ROWS)


def gated_mlp(draw: Draw, model: Model) -> Sizes:
    """The MLP of a layer, or of an expert, in training."""
    (part, n), m = inner(draw, model), min(tokens(draw), 8192)
    sizes = {"M": m, "H": model.hidden, "I": n, "recompute": draw.chance(0.3)}
    return Sizes(part, sizes, half(draw), trained=m >= TRAINING_ROWS, **product_cost(m, 3 * n, model.hidden))


def relu2(draw: Draw, model: Model) -> Sizes:
    """An MLP without a gate, or with one."""
    (part, n), m = inner(draw, model), tokens(draw)
    gated = draw.chance(0.3)
    return Sizes(
        part, {"M": m, "N": n, "gated": gated}, floating(draw), (2 + gated) * m * n, trained=m >= TRAINING_ROWS
    )


def swigluoai(draw: Draw, model: Model) -> Sizes:
    """Gate and up of an MLP, beside each other or one after the other."""
    (part, n), m = inner(draw, model), tokens(draw)
    params = {"M": m, "N": n, "interleaved": draw.chance(0.5)}
    return Sizes(part, params, floating(draw), 3 * m * n, trained=m >= TRAINING_ROWS)


def activation_fp8(draw: Draw, model: Model) -> Sizes:
    """The same with a float8 result."""
    (part, n), m = inner(draw, model), tokens(draw)
    options = draw.pick(({}, {}, {"ue8m0": True}))
    return Sizes(part, {"M": m, "N": n, **options}, floating(draw), 3 * m * n)
