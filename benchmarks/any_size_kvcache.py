"""How the problems of the KV cache are drawn from a model: sequences, new tokens, pages, e4m3."""

from __future__ import annotations

from typing import Any

from any_size_attention import half_or_single, heads_of
from any_size_draw import Draw, Model, Sizes
from any_size_parts import ODD, POWERS, decoded

PAGE_SIZES = (16, 16, 16, 32, 64, 64, 128, 1, 3, None)
"""None: contiguous caches."""
CONTEXTS = (1, 67, 128, 333, 512)
"""Tokens of a sequence that decodes; the cache of a larger one costs memory, and the op no time."""


def _sequences(draw: Draw) -> dict[str, Any]:
    """Decoding in half of all, prefill of one or more sequences, and a mix of both."""
    kind = draw.below(10)
    if kind < 5:
        return {"lengths": [draw.pick(CONTEXTS)] * decoded(draw), "new": 1}
    if kind < 9:
        lengths = [draw.pick(ODD + POWERS) for _ in range(draw.pick((1, 1, 2, 4)))]
        return {"lengths": lengths, "new": lengths}
    prompt, decoding = draw.pick(ODD + POWERS), [draw.pick(CONTEXTS) for _ in range(decoded(draw))]
    return {"lengths": [prompt, *decoding], "new": [prompt, *([1] * len(decoding))]}


def _cache(draw: Draw, model: Model) -> dict[str, Any]:
    """Heads, sequences and form of the caches of one layer."""
    sizes: dict[str, Any] = {**heads_of(draw, model), **_sequences(draw), "page_size": draw.pick(PAGE_SIZES)}
    scales = draw.pick((None, None, None, "head", "token"))
    return sizes if scales is None else {**sizes, "scales": scales}


def _elements(sizes: dict[str, Any], copies: int) -> int:
    """Elements of the caches and of `copies` packed tensors of K and V."""
    new, lengths = sizes["new"], sizes["lengths"]
    tokens = sum(new) if isinstance(new, list) else new * len(lengths)
    page_size = sizes["page_size"]
    if page_size is None:
        stored = len(lengths) * max(lengths)
    else:
        pages = sum(-(-n // page_size) for n in lengths)
        stored = page_size * (pages + pages // 7 + 1)  # as `samples.problem` makes them
    return int(2 * sizes["H_kv"] * sizes["D"] * (stored + copies * tokens))


def kv_append(draw: Draw, model: Model) -> Sizes:
    """The K and V of new tokens."""
    sizes = _cache(draw, model)
    del sizes["H"]
    return Sizes("kv", sizes, half_or_single(draw), _elements(sizes, 1))


def mla_kv_append(draw: Draw, model: Model) -> Sizes | None:
    """The latents of new tokens, in their dtype and in 656 bytes."""
    if not model.kv_lora:
        return None
    width = {"D": model.kv_lora, "D_pe": model.rope_dim}
    sizes: dict[str, Any] = {**width, **_sequences(draw), "page_size": draw.pick(PAGE_SIZES)}
    if width == {"D": 512, "D_pe": 64} and draw.chance(0.4):
        sizes["cache"] = "e4m3"
    elements = _elements({**sizes, "H_kv": 1, "D": sum(width.values())}, 1) // 2
    return Sizes("latents", sizes, half_or_single(draw), elements)


def rope_kv_append(draw: Draw, model: Model) -> Sizes:
    """The heads of new tokens, also normalised."""
    sizes = _cache(draw, model)
    if model.rotary:
        sizes["R"] = model.rotary
    if draw.chance(0.4):
        sizes["norm"] = True
    return Sizes("heads", sizes, half_or_single(draw), _elements(sizes, 1 + sizes["H"] // sizes["H_kv"]))


def kv_gather(draw: Draw, model: Model) -> Sizes:
    """All tokens of prompts, or the last of each sequence."""
    sizes = _cache(draw, model)
    del sizes["H"]
    return Sizes("kv", sizes, half_or_single(draw), _elements(sizes, 1))


def kv_copy_pages(draw: Draw, model: Model) -> Sizes:
    """Pages of sequences that part from a shared prefix."""
    heads, pairs = heads_of(draw, model), draw.pick((1, 2, 3, 7, 16, 64, 333))
    page_size = draw.pick([n for n in PAGE_SIZES if n is not None])
    sizes = {"H_kv": heads["H_kv"], "D": heads["D"], "page_size": page_size, "N": pairs, "pages": 2 * pairs}
    elements = 2 * 2 * pairs * page_size * heads["H_kv"] * heads["D"]
    return Sizes("pages", sizes, half_or_single(draw), elements)
