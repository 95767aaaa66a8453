"""How the problems of attention are drawn from a model: heads, lengths, masks, dtypes."""

from __future__ import annotations

from typing import Any

import torch
from any_size_draw import BF16, FP8, FP16, FP32, TRAINING_ROWS, Draw, Model, Sizes

LENGTHS = (64, 67, 128, 197, 251, 333, 512, 777, 1021, 1024, 1500, 2000, 2048, 3001, 4096, 5000, 8192, 16381, 32768)
CONTEXTS = (64, 333, 1024, 1500, 2000, 4096, 5000, 8191, 16384, 32768, 65536)
TEXT_KEYS = (77, 333, 512)
"""Keys of a text that an image attends to."""
MOST_TOKENS = 65536
SHORT = 1024
"""Queries up to which torch's attention with all scores in memory competes."""


def half_or_single(draw: Draw) -> torch.dtype:
    """bf16 in seven of ten, fp16 in two, fp32 in one."""
    return draw.pick((BF16,) * 7 + (FP16,) * 2 + (FP32,))


def heads_of(draw: Draw, model: Model) -> dict[str, int]:
    """Heads on one of 1, 2, 4 or 8 GPUs, where they divide."""
    ranks = draw.pick((1, 1, 1, 2, 4, 8))
    if model.heads % ranks:
        ranks = 1
    kv_heads = model.kv_heads // ranks if model.kv_heads % ranks == 0 else 1
    heads = model.heads // ranks
    return {"H": heads, "H_kv": kv_heads if heads % kv_heads == 0 else 1, "D": model.head_dim}


def batch_of(draw: Draw, length: int) -> int:
    """Sequences of this length."""
    return draw.pick([n for n in (1, 1, 2, 3, 4, 8, 16, 32, 64) if n * length <= MOST_TOKENS] or [1])


def lengths_of(draw: Draw, model: Model) -> tuple[str, int, dict[str, int]]:
    """(kind, B, lengths): prefill in 60 of 100, decoding in 20, a chunk behind a prefix in 12, an image over a text."""
    kind = draw.below(100)
    if kind < 60 or model.encoder:
        length = draw.pick(LENGTHS)
        return "prefill", batch_of(draw, length), {"S": length}
    if kind < 80:
        context = draw.pick(CONTEXTS)
        return "decode", batch_of(draw, context), {"S_q": draw.pick((1, 1, 1, 2, 5, 8)), "S_k": context}
    if kind < 92:
        context, chunk = draw.pick(CONTEXTS), draw.pick((64, 100, 256, 512, 777, 2048))
        return "chunk", 1, {"S_q": min(chunk, context), "S_k": context}
    return "cross", batch_of(draw, 4096), {"S_q": draw.pick((256, 1024, 4096)), "S_k": draw.pick(TEXT_KEYS)}


def _work(sizes: dict[str, Any], d: int, d_v: int) -> dict[str, Any]:
    """Estimates for any mask: half of the pairs where it is causal, a band where it is a window."""
    s_q, s_k = sizes.get("S_q", sizes.get("S", 0)), sizes.get("S_k", sizes.get("S", 0))
    batch_heads = sizes["B"] * sizes["H"]
    pairs = s_q * s_k / (2 if sizes.get("causal") and s_q == s_k else 1)
    if isinstance(sizes.get("window"), int):
        pairs = min(pairs, s_q * sizes["window"])
    keys = sizes["B"] * sizes.get("H_kv", sizes["H"]) * s_k
    return {"flops": 2.0 * batch_heads * pairs * (d + d_v), "elements": (batch_heads * s_q + keys) * (d + d_v)}


def fmha(draw: Draw, model: Model) -> Sizes:
    """Causal, full, a window, soft caps, sinks and documents, as the models have them; grouped heads."""
    kind, batch, lengths = lengths_of(draw, model)
    sizes: dict[str, Any] = {"B": batch, **heads_of(draw, model), **lengths}
    dtype, mask = half_or_single(draw), "causal"
    if model.encoder or kind == "cross" or draw.chance(0.12):
        mask = "full"
    elif model.window and draw.chance(0.5):
        mask, sizes["window"] = "window", model.window
    elif kind == "prefill" and draw.chance(0.08):
        mask, sizes["documents"] = "documents", draw.pick((3, 8, 32))
    if mask == "causal":
        sizes["causal"] = True
    if model.softcap and mask != "full":
        sizes["softcap"] = model.softcap
    if model.sinks and mask != "full":
        sizes["sinks"] = True
    if draw.chance(0.5):
        sizes["layout"] = "token"
    peers: tuple[str, ...] = ("math",) if max(lengths.values()) <= SHORT else ()
    if mask in ("window", "documents") or "softcap" in sizes or "sinks" in sizes:
        peers += ("flex",)
    if mask == "window" and max(lengths.values()) <= 4096:
        peers += ("dense_mask", "dense_mask_cudnn")
    trained = kind == "prefill" and lengths["S"] >= TRAINING_ROWS
    work = _work(sizes, model.head_dim, model.head_dim)
    return Sizes(f"{kind}_{mask}", sizes, dtype, trained=trained, peers=peers, **work)


def fmha_dropout(draw: Draw, model: Model) -> Sizes:
    """Training: causal or full, a tenth of the probabilities dropped."""
    sizes: dict[str, Any] = {"B": draw.between(1, 4), **heads_of(draw, model), "S": draw.pick((128, 333, 1024, 2048))}
    mask = "full" if model.encoder else "causal"
    if mask == "causal":
        sizes["causal"] = True
    work = _work(sizes, model.head_dim, model.head_dim)
    return Sizes(f"training_{mask}", {**sizes, "p": 0.1}, half_or_single(draw), trained=True, **work)


def fmha_fp8(draw: Draw, model: Model) -> Sizes:
    """Causal or full, scales of heads or of blocks of tokens."""
    kind, batch, lengths = lengths_of(draw, model)
    sizes: dict[str, Any] = {"B": batch, **heads_of(draw, model), **lengths}
    mask = "full" if model.encoder or kind == "cross" or draw.chance(0.2) else "causal"
    if mask == "causal":
        sizes["causal"] = True
    if draw.chance(0.3):
        sizes["blocks"] = "qkv"
    return Sizes(f"{kind}_{mask}", sizes, FP8, **_work(sizes, model.head_dim, model.head_dim))


def _ragged(draw: Draw, most: int) -> tuple[int, ...]:
    """Lengths of sequences, mostly short ones, `most` tokens together at the most."""
    lengths: list[int] = []
    for _ in range(draw.between(2, 64)):
        octave = draw.between(0, 12)
        length = draw.between(1 << octave, (2 << octave) - 1)
        if sum(lengths) + length <= most:
            lengths.append(length)
    return tuple(lengths) or (1,)


def fmha_varlen(draw: Draw, model: Model) -> Sizes:
    """Packed sequences of training, and of decoding over contexts of several lengths."""
    heads = heads_of(draw, model)
    sizes: dict[str, Any] = dict(heads)
    if draw.chance(0.25) and not model.encoder:
        contexts = _ragged(draw, 32768)
        kind, sizes["lengths"], sizes["lengths_k"] = "decode", (1,) * len(contexts), contexts
    else:
        kind, sizes["lengths"] = "packed", _ragged(draw, draw.pick((333, 2000, 8192, 32768)))
    queries, keys = sizes["lengths"], sizes.get("lengths_k", sizes["lengths"])
    if not model.encoder:
        sizes["causal"] = True
        if model.window and draw.chance(0.5):
            sizes["window"] = (model.window - 1, None)
    pairs = sum(n * m for n, m in zip(queries, keys, strict=True))
    work = {
        "flops": 4.0 * heads["H"] * heads["D"] * pairs,
        "elements": 2 * heads["D"] * (heads["H"] * sum(queries) + heads["H_kv"] * sum(keys)),
    }
    trained = kind == "packed" and sum(queries) >= TRAINING_ROWS
    return Sizes(f"{kind}_{len(queries)}", sizes, half_or_single(draw), trained=trained, **work)


def _cache(draw: Draw, model: Model) -> dict[str, Any]:
    """Heads, pages and options of a KV cache; one in five of e4m3."""
    sizes: dict[str, Any] = {**heads_of(draw, model), "page": draw.pick((None, 1, 16, 16, 64, 64, 256))}
    if draw.chance(0.2):
        sizes |= {"cache": "e4m3", "token_scales": draw.chance(0.3)}
    if model.window and draw.chance(0.5):
        sizes["window"] = (model.window - 1, 0)
    if model.softcap:
        sizes["softcap"] = model.softcap
    if model.sinks:
        sizes["sinks"] = True
    return sizes


def _cache_work(sizes: dict[str, Any], new: tuple[int, ...]) -> dict[str, Any]:
    """Every key of the cache for each new token; whole pages, and the capacity where caches are contiguous."""
    lengths, d, page = sizes["lengths"], sizes["D"], sizes["page"]
    pairs = sum(n * m for n, m in zip(new, lengths, strict=True))
    slots = len(lengths) * max(lengths)
    if page:
        pages = sum(-(-n // page) for n in lengths)
        slots = (pages + pages // 8 + 1) * page
    elements = 2 * d * (sizes["H_kv"] * slots + sizes["H"] * sum(new))
    return {"flops": 4.0 * sizes["H"] * d * pairs, "elements": elements}


def fmha_decode(draw: Draw, model: Model) -> Sizes | None:
    """Steps of decoding and of verifying drafts, over contexts of one or of several lengths."""
    if model.encoder:
        return None
    sizes, context = _cache(draw, model), draw.pick(CONTEXTS)
    tokens = draw.pick((None, None, None, 1, 2, 5, 8))
    if draw.chance(0.5):
        kind, sizes["lengths"] = "mixed", _ragged(draw, 65536)
    else:
        kind, sizes["lengths"] = "equal", (context,) * batch_of(draw, context)
    if tokens is not None:
        sizes["S_q"] = tokens
    work = _cache_work(sizes, (tokens or 1,) * len(sizes["lengths"]))
    return Sizes(f"{kind}_{len(sizes['lengths'])}", sizes, half_or_single(draw), trained=False, **work)


def fmha_paged(draw: Draw, model: Model) -> Sizes | None:
    """Sequences that decode, beside up to two chunks of prefill behind prefixes of any length."""
    if model.encoder:
        return None
    sizes, lengths = _cache(draw, model), list(_ragged(draw, 32768))
    new = [1] * len(lengths)
    for _ in range(draw.below(3)):
        chunk = draw.pick((64, 100, 256, 512, 777, 2048))
        new.append(chunk)
        lengths.append(chunk + draw.pick((0, 0, 333, 4096)))
    sizes |= {"lengths": tuple(lengths), "new": tuple(new)}
    work = _cache_work(sizes, tuple(new))
    return Sizes(f"step_{len(new)}", sizes, half_or_single(draw), trained=False, **work)


def mla(draw: Draw, model: Model) -> Sizes | None:
    """Latent attention with its own rotated parts."""
    if not model.kv_lora:
        return None
    kind, batch, lengths = lengths_of(draw, model)
    d, heads = model.head_dim, heads_of(draw, model)["H"]
    sizes: dict[str, Any] = {"B": batch, "H": heads, **lengths, "D": d, "D_pe": model.rope_dim, "D_v": d}
    if kind == "cross":
        sizes["causal"] = False
    if draw.chance(0.5):
        sizes["layout"] = "views"
    work = _work({**sizes, "causal": kind != "cross"}, d + model.rope_dim, d)
    return Sizes(kind, sizes, half_or_single(draw), trained=kind == "prefill", **work)


def mla_decode(draw: Draw, model: Model) -> Sizes | None:
    """Steps of decoding over latents, in the queries' dtype and in 656 bytes a token; some with a choice of slots."""
    if not model.kv_lora:
        return None
    heads, latent = heads_of(draw, model)["H"], model.kv_lora
    sizes: dict[str, Any] = {"H": heads, "D": latent + model.rope_dim, "d_v": latent}
    sizes["page"] = draw.pick((None, 1, 16, 64, 64, 256))
    context, tokens = draw.pick(CONTEXTS), draw.pick((None, None, None, 1, 2, 4))
    mixed = draw.chance(0.5)
    sizes["lengths"] = _ragged(draw, 65536) if mixed else (context,) * batch_of(draw, context)
    if tokens is not None:
        sizes["S_q"] = tokens
    if (latent, model.rope_dim) == (512, 64) and draw.chance(0.3):
        sizes["cache"] = "e4m3"
    if draw.chance(0.2):
        sizes["topk"] = draw.pick((512, 2048))
    lengths, count = sizes["lengths"], tokens or 1
    pairs = count * sum(min(n, sizes.get("topk", n)) for n in lengths)
    rows = max(lengths) * len(lengths) if sizes["page"] is None else sum(lengths) + sizes["page"] * len(lengths)
    elements = sizes["D"] * (rows + 2 * heads * count * len(lengths))
    flops = 2.0 * heads * (sizes["D"] + latent) * pairs
    name = f"{'mixed' if mixed else 'equal'}_{len(lengths)}"
    return Sizes(name, sizes, half_or_single(draw), elements, flops, trained=False)


def merge_states(draw: Draw, model: Model) -> Sizes:
    """States of a ring of GPUs, of a shared prefix, of keys divided among programs."""
    kind, heads, d = draw.pick(("ring", "pair", "parts", "stack")), heads_of(draw, model)["H"], model.head_dim
    decoding = kind in ("pair", "parts")
    count = {"ring": 2, "pair": 2}.get(kind) or draw.pick((2, 3, 4, 8, 16))
    batch, length = (draw.between(1, 64), 1) if decoding else (1, draw.pick(LENGTHS))
    sizes: dict[str, Any] = {"N": count, "B": batch, "H": heads, "S": length, "D": d}
    if kind != "stack":
        sizes["form"] = kind
    elements = 2 * (count + 1) * batch * heads * length * d
    return Sizes(kind, sizes, half_or_single(draw), elements, trained=kind == "stack")
