"""Problems of `kv_append_`, and calls that must fail."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.kvcache.samples import problem, replaced, tokens_of
from tilewright.ops.quant.numbers import E4M3


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `samples.problem`; k and v are slices of one projection, as models make them, and with
    special=True hold NaN and infinities.
    """
    caches = problem(params, dtype, device, seed)
    rng = rows.generator(seed + 1)
    h, d, d_v = params["H_kv"], caches.k_cache.shape[3], caches.v_cache.shape[3]
    tokens = tokens_of(params, caches.new)
    kv = rows.random_tensor((tokens, h * (d + d_v)), dtype, device, rng, scale=params.get("scale", 1.0))
    if params.get("special") and kv.numel() > 2:
        kv[0, 0], kv[0, -1], kv[-1, 0] = torch.nan, torch.inf, -torch.inf
    k, v = kv[:, : h * d].view(tokens, h, d), kv[:, h * d :].view(tokens, h, d_v)
    return Sample((caches.k_cache, caches.v_cache, k, v, caches.lengths), caches.options)


def _fwd(name: str, params: Mapping[str, Any]) -> Workload:
    return Workload(name, params, directions=("fwd",))


_LLAMA_8B = {"H_kv": 8, "D": 128, "page_size": 16}
_DEEP_PAGES = {**_LLAMA_8B, "page_size": 64}
_SMALL = {"H_kv": 2, "D": 16, "page_size": 4}
_EVEN = [1024] * 8
WORKLOADS = (
    _fwd("llama8b_prefill_8k", {**_LLAMA_8B, "lengths": _EVEN, "new": _EVEN}),
    _fwd("llama8b_prefill_ragged", {**_LLAMA_8B, "lengths": [5000, 17, 1175, 2000], "new": [5000, 17, 1175, 2000]}),
    _fwd("llama8b_prefill_contiguous", {**_LLAMA_8B, "page_size": None, "lengths": _EVEN, "new": 1024}),
    _fwd("llama8b_prefill_e4m3_heads", {**_DEEP_PAGES, "lengths": _EVEN, "new": _EVEN, "scales": "head"}),
    _fwd("llama8b_prefill_e4m3_tokens", {**_DEEP_PAGES, "lengths": _EVEN, "new": _EVEN, "scales": "token"}),
    _fwd("qwen7b_prefill_8k", {"H_kv": 4, "D": 128, "page_size": 16, "lengths": _EVEN, "new": _EVEN}),
    *(_fwd(f"llama8b_decode_{b}", {**_LLAMA_8B, "lengths": [128] * b, "new": 1}) for b in (1, 16, 64, 256)),
    _fwd("llama8b_decode_64_e4m3_tokens", {**_DEEP_PAGES, "lengths": [128] * 64, "new": 1, "scales": "token"}),
)
CPU_WORKLOADS = (
    Workload(
        "small",
        {"H_kv": 4, "D": 64, "page_size": 16, "lengths": [128] * 4, "new": 128},
        (torch.bfloat16, torch.float32),
    ),
)
EDGE_CASES = (
    _fwd("decode: one new token each, on both sides of a page's end", {**_SMALL, "lengths": [4, 5, 1, 8, 7], "new": 1}),
    _fwd("ragged: more tokens than a program takes", {**_SMALL, "lengths": [9, 3, 30], "new": [9, 0, 23]}),
    _fwd("odd_page: pages of 3 tokens", {**_SMALL, "page_size": 3, "lengths": [3, 7, 2], "new": [3, 2, 1]}),
    _fwd("page_1: a page a token", {**_SMALL, "page_size": 1, "lengths": [3, 1], "new": [2, 1]}),
    _fwd("contiguous: a page is a sequence", {**_SMALL, "page_size": None, "lengths": [6, 9, 1], "new": 1}),
    _fwd(
        "contiguous_ragged: with room behind",
        {**_SMALL, "page_size": None, "lengths": [6, 9], "new": [6, 2], "capacity": 13},
    ),
    _fwd(
        "padding: tokens behind cu_seqlens, sequences of length 0",
        {**_SMALL, "lengths": [5, 0, 6], "new": [2, 0, 1], "padding": 4},
    ),
    _fwd("left_out: a captured batch with sequences of length 0", {**_SMALL, "lengths": [0, 5, 0], "new": 1}),
    _fwd("nothing_live: all sequences are left out", {**_SMALL, "lengths": [0, 0], "new": 1}),
    _fwd(
        "d_80: no power of two, another D of v", {**_SMALL, "H_kv": 3, "D": 80, "D_v": 24, "lengths": [5, 6], "new": 2}
    ),
    _fwd("d_1: a single element", {**_SMALL, "H_kv": 1, "D": 1, "lengths": [5, 6], "new": 2}),
    _fwd("heads_first: strides of another layout", {**_SMALL, "heads_first": True, "lengths": [5, 6], "new": 2}),
    _fwd(
        "e4m3_heads: given scales, some values beyond 448",
        {**_SMALL, "lengths": [5, 6], "new": 2, "scales": "head", "special": True},
    ),
    _fwd(
        "e4m3_tokens: scales are computed and written", {**_SMALL, "lengths": [9, 3], "new": [9, 2], "scales": "token"}
    ),
    _fwd(
        "e4m3_special: NaN and infinities",
        {**_SMALL, "lengths": [9, 3], "new": [9, 2], "scales": "token", "special": True, "padding": 1},
    ),
    _fwd(
        "e4m3_tiny: amax below the floor",
        {**_SMALL, "H_kv": 3, "D": 5, "lengths": [4], "new": 3, "scales": "token", "scale": 1e-7},
    ),
    _fwd("empty: no tokens", {**_SMALL, "lengths": [4, 2], "new": 0}),
    _fwd("no_sequences: an empty batch", {**_SMALL, "lengths": [], "new": 1}),
)


def _bad(name: str, match: str, change: Callable[[dict[str, Any]], object], **params: Any) -> BadInput:
    """A small call with `change` made to its arguments."""

    def make(device: torch.device) -> Sample:
        sample = inputs({**_SMALL, "lengths": [5, 6], "new": [2, 1], **params}, torch.bfloat16, device, 0)
        names = ("k_cache", "v_cache", "k", "v", "lengths")
        arguments = {**dict(zip(names, sample.args, strict=True)), **sample.kwargs}
        change(arguments)
        return Sample(tuple(arguments.pop(name) for name in names), arguments)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("int64 lengths", r"lengths is \(2,\) torch.int64; needs int32", replaced("lengths", Tensor.long)),
    _bad("int64 table", "block_table is .* torch.int64; needs int32", replaced("block_table", Tensor.long)),
    _bad("int64 cu_seqlens", "cu_seqlens is .* torch.int64; needs int32", replaced("cu_seqlens", Tensor.long)),
    _bad("flat table", r"block_table is \(4,\)", replaced("block_table", Tensor.flatten)),
    _bad(
        "cu_seqlens too short",
        r"cu_seqlens is \(2,\) torch.int32; needs int32, \(3,\)",
        replaced("cu_seqlens", lambda t: t[1:]),
    ),
    _bad("another dtype", "k is torch.float32, caches torch.bfloat16", replaced("k", Tensor.float)),
    _bad("too few heads", r"needs \(T, 2, 16\)", replaced("v", lambda t: t[:, :1])),
    _bad("not packed", r"k is \(3, 32\); needs packed tokens", replaced("k", lambda t: t.flatten(1))),
    _bad(
        "e4m3 without scales", "float8_e4m3fn needs both", lambda a: (a.pop("k_scale"), a.pop("v_scale")), scales="head"
    ),
    _bad(
        "scales without e4m3",
        "other dtypes neither",
        lambda a: a.update(k_scale=a["k"].new_ones(2).float(), v_scale=a["k"].new_ones(2).float()),
    ),
    _bad("scale of another shape", "a scale for each head", replaced("k_scale", lambda t: t[:1]), scales="head"),
    _bad("integers", "k_cache is torch.int32", replaced("k_cache", lambda t: t.to(torch.int32))),
    _bad("vector", r"k_cache is \(16,\)", replaced("k_cache", lambda t: t[0, 0, 0])),
    _bad("not a tensor", "k is a list", replaced("k", lambda t: [1.0])),
    _bad("expanded cache", "k_cache is expanded", replaced("k_cache", lambda t: t[:1].expand(t.shape))),
    _bad("e4m3 tokens", "k is torch.float8_e4m3fn", replaced("k", lambda t: t.to(E4M3)), scales="head"),
    _bad("sequences without pages", "each sequence has its own", lambda a: a.pop("block_table")),
    _bad("tokens that do not divide", "3 tokens for 2 sequences", lambda a: a.pop("cu_seqlens")),
)
