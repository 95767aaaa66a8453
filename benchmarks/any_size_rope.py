"""How rotations of queries and keys are drawn from a model; `any_size_recipes.py` says what a recipe is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from any_size_draw import TRAINING_ROWS, Draw, Model, Sizes
from any_size_parts import ODD, POWERS, decoded, floating, part_of


def apply_rope(draw: Draw, model: Model) -> Sizes:
    """Queries and keys of a batch, of decoding, or of packed sequences with positions."""
    heads = part_of(draw, model.heads)
    sizes: dict[str, Any] = {"H": heads, "H_kv": max(model.kv_heads * heads // model.heads, 1), "D": model.head_dim}
    if model.rotary:
        sizes["R"] = model.rotary
    if model.name.startswith("glm4_"):
        sizes["interleaved"] = True
    kind = draw.below(10)
    if kind < 3:
        batch, length = decoded(draw), 1
    else:
        length = draw.pick(ODD + POWERS)
        batch = draw.pick((1, 1, 2, 4, 8))
    if kind == 9:
        sizes |= {"T": length, "positions": length + 8}
        batch = 1
    else:
        sizes |= {"B": batch, "S": length}
    elements = 2 * batch * length * (heads + sizes["H_kv"]) * model.head_dim
    return Sizes("heads", sizes, floating(draw), elements, trained=length >= TRAINING_ROWS)


def qk_norm_rope(draw: Draw, model: Model) -> Sizes:
    """The same heads, normalised first."""
    rotated = apply_rope(draw, model)
    return replace(rotated, params={**rotated.params, "offset": 1.0}) if model.gelu else rotated
