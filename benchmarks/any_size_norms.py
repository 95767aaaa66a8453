"""How the problems of norms are drawn from a model; `any_size_recipes.py` says what a recipe is."""

from __future__ import annotations

from any_size_draw import TRAINING_ROWS, Draw, Model, Recipe, Sizes
from any_size_parts import floating, part_of, tokens


def normed(draw: Draw, model: Model) -> tuple[str, int, int]:
    """(part, M, N) of what is normalised: tokens, heads of queries, or a latent."""
    m, kind = tokens(draw), draw.below(10)
    if kind < 2:
        return "heads", m * part_of(draw, model.heads), model.head_dim
    if kind < 4 and model.kv_lora:
        return "latent", m, draw.pick((model.kv_lora, model.q_lora or model.kv_lora))
    return "hidden", m, model.hidden


def norm(arrays: int) -> Recipe:
    """Recipe of a norm with so many arrays of the rows' size."""

    def recipe(draw: Draw, model: Model) -> Sizes:
        part, m, n = normed(draw, model)
        options = {"offset": 1.0} if model.gelu else {}
        return Sizes(part, {"M": m, "N": n, **options}, floating(draw), arrays * m * n, trained=m >= TRAINING_ROWS)

    return recipe


def layer_norm(draw: Draw, model: Model) -> Sizes:
    """Rows with weight and bias."""
    m, n = tokens(draw), model.hidden
    return Sizes("hidden", {"M": m, "N": n}, floating(draw), 2 * m * n, trained=m >= TRAINING_ROWS)


def group_norm(draw: Draw, model: Model) -> Sizes:
    """Images of a diffusion model's layers; a channel has a part of a model's hidden size."""
    batch, side = draw.pick((1, 2, 4, 8)), draw.pick((8, 16, 32, 48, 64, 96, 128))
    channels = draw.pick((4, 8, 10, 16, 20, 40))
    params = {"B": batch, "G": 32, "C": channels, "S": (side, side)}
    if draw.chance(0.3):
        params["channels_last"] = True
    return Sizes("image", params, floating(draw), 2 * batch * 32 * channels * side * side)


def rms_norm_gated(draw: Draw, model: Model) -> Sizes:
    """The heads of a gated linear attention, or the inner rows of a state-space layer, also in groups."""
    m, kind = tokens(draw), draw.below(10)
    if kind < 5:
        m, n, options = m * part_of(draw, model.heads), model.head_dim, {}
    else:
        n, options = min(2 * model.hidden, 8192), {"norm_before_gate": False}
        if kind < 8:
            groups = draw.pick((2, 4, 8))
            n, options = n // groups, {**options, "groups": groups}
    elements = 3 * m * n * options.get("groups", 1)
    return Sizes("gated", {"M": m, "N": n, **options}, floating(draw), elements, trained=m >= TRAINING_ROWS)


def norm_fp8(draw: Draw, model: Model) -> Sizes:
    """A norm whose result the next layer reads in float8."""
    m, n = tokens(draw), model.hidden
    options = draw.pick(({}, {}, {"ue8m0": True}))
    return Sizes("hidden", {"M": m, "N": n, **options}, floating(draw), 3 * m * n)
