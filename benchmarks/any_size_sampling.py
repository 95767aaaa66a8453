"""Recipes of the ops that choose tokens: rows that decode, over a model's vocabulary."""

from __future__ import annotations

from typing import Any

from any_size_draw import FP32, Draw, Model, Sizes
from any_size_parts import decoded, floating, tokens
from torch import int64


def greedy(draw: Draw, model: Model) -> Sizes:
    """Logits of a vocabulary."""
    m, n = decoded(draw), model.vocab
    return Sizes("vocabulary", {"M": m, "N": n}, floating(draw), m * n)


def sample(draw: Draw, model: Model) -> Sizes:
    """Parameters by row, as a server has them: some filters, of all requests or of some."""
    m, n = decoded(draw), model.vocab
    params: dict[str, Any] = {"M": m, "N": n, "temperature": draw.pick(((1.0,), (0.7,), (0.6, 0.0, 1.0)))}
    if draw.chance(0.6):
        params["top_k"] = draw.pick(((20,), (50,), (50, 0), (1000,)))
    if draw.chance(0.7):
        params["top_p"] = draw.pick(((0.9,), (0.95,), (0.8, 1.0)))
    if draw.chance(0.2):
        params["min_p"] = (0.05,)
    if draw.chance(0.3):
        params["logprobs"] = draw.pick(("sampled", "model"))
    return Sizes("vocabulary", params, floating(draw), m * n)


def top_k(draw: Draw, model: Model) -> Sizes:
    """The likeliest tokens, for their log-probabilities; the experts of a router."""
    if model.experts and draw.chance(0.4):
        m = tokens(draw)
        return Sizes("router", {"M": m, "N": model.experts, "K": model.top_k}, floating(draw), m * model.experts)
    m, k = decoded(draw), draw.pick((1, 5, 20, 64, 200))
    return Sizes("vocabulary", {"M": m, "N": model.vocab, "K": k}, floating(draw), m * model.vocab)


def apply_penalties(draw: Draw, model: Model) -> Sizes:
    """Penalties by row, with a prompt or a bias in some."""
    m, n = decoded(draw), model.vocab
    params: dict[str, Any] = {"M": m, "N": n, "repetition": "rows", "presence": "rows", "frequency": "rows"}
    params |= {name: True for name in ("prompt", "bias") if draw.chance(0.4)}
    return Sizes("vocabulary", params, floating(draw), 4 * m * n)


def verify_chain(draw: Draw, model: Model) -> Sizes:
    """Two to eight drafts a request, certain ones in one of four."""
    m, n, drafts = draw.between(1, 16), model.vocab, draw.between(2, 8)
    params = {"M": m, "N": n, "drafts": drafts, "near": 0.5, "certain": draw.chance(0.25)}
    return Sizes("vocabulary", params, FP32, m * n * (2 * drafts + 1))


def verify_tree(draw: Draw, model: Model) -> Sizes:
    """Trees of 8 to 64 nodes."""
    m, nodes = decoded(draw), draw.between(8, 64)
    return Sizes("tree", {"M": m, "nodes": nodes}, int64, 5 * m * nodes)
