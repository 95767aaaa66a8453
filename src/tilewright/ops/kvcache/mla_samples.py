"""Problems of `mla_kv_append_`, and calls that must fail."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.kvcache.mla_layout import TOKEN_BYTES, quantize_mla_cache
from tilewright.ops.kvcache.samples import problem, replaced, tokens_of


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: D (of latents), D_pe, those of `samples.problem` but for heads and scales, cache ("e4m3": tokens of 656
    bytes), special (NaN and infinities), scale (of all numbers).  c_kv and k_pe are views of one projection.
    """
    d, d_pe = params["D"], params["D_pe"]
    caches = problem({**params, "H_kv": 1, "D": d + d_pe, "D_v": 1}, dtype, device, seed)
    rng = rows.generator(seed + 1)
    tokens = tokens_of(params, caches.new)
    projected = rows.random_tensor((tokens, d + d_pe), dtype, device, rng, scale=params.get("scale", 1.0))
    if params.get("special") and projected.numel() > 2:
        projected[0, 0], projected[0, -1], projected[-1, 0] = torch.nan, torch.inf, -torch.inf
    cache = caches.k_cache.squeeze(2)
    if params.get("cache") == "e4m3":
        cache = quantize_mla_cache(cache)
    return Sample((cache, projected[:, :d], projected[:, d:], caches.lengths), caches.options)


def _fwd(name: str, params: Mapping[str, Any]) -> Workload:
    return Workload(name, params, directions=("fwd",))


_DEEPSEEK = {"D": 512, "D_pe": 64, "page_size": 64}
_SMALL = {"D": 32, "D_pe": 16, "page_size": 4}
_PACKED = {**_DEEPSEEK, "page_size": 4, "cache": "e4m3"}
_EVEN = [1024] * 8
WORKLOADS = (
    _fwd("deepseek_prefill_8k", {**_DEEPSEEK, "lengths": _EVEN, "new": _EVEN}),
    _fwd("deepseek_prefill_8k_656bytes", {**_DEEPSEEK, "cache": "e4m3", "lengths": _EVEN, "new": _EVEN}),
    *(_fwd(f"deepseek_decode_{b}", {**_DEEPSEEK, "lengths": [128] * b, "new": 1}) for b in (1, 128)),
    *(
        _fwd(f"deepseek_decode_{b}_656bytes", {**_DEEPSEEK, "cache": "e4m3", "lengths": [128] * b, "new": 1})
        for b in (1, 128)
    ),
)
CPU_WORKLOADS = (_fwd("small", {**_DEEPSEEK, "page_size": None, "lengths": [128] * 4, "new": 128}),)
EDGE_CASES = (
    _fwd("decode: one new token each, on both sides of a page's end", {**_SMALL, "lengths": [4, 5, 1, 8, 7], "new": 1}),
    _fwd("ragged: more tokens than a program takes", {**_SMALL, "lengths": [9, 3, 30], "new": [9, 0, 23]}),
    _fwd("page_1: a page a token", {**_SMALL, "page_size": 1, "lengths": [3, 1], "new": [2, 1]}),
    _fwd("odd_page: pages of 3 tokens", {**_SMALL, "page_size": 3, "lengths": [3, 7, 2], "new": [3, 2, 1]}),
    _fwd("contiguous: a page is a sequence", {**_SMALL, "page_size": None, "lengths": [6, 9, 1], "new": 1}),
    _fwd(
        "padding: tokens behind cu_seqlens, sequences of length 0",
        {**_SMALL, "lengths": [5, 0, 6], "new": [2, 0, 1], "padding": 4},
    ),
    _fwd("nothing_live: all sequences are left out", {**_SMALL, "lengths": [0, 0], "new": 1}),
    _fwd("d_1: a single element of each part", {**_SMALL, "D": 1, "D_pe": 1, "lengths": [5, 6], "new": 2}),
    _fwd("d_80: no power of two", {**_SMALL, "D": 80, "D_pe": 24, "lengths": [5, 6], "new": 2}),
    _fwd("model: of 576 columns", {**_DEEPSEEK, "lengths": [65, 6], "new": 2}),
    _fwd("packed: 656 bytes a token", {**_PACKED, "lengths": [9, 3], "new": [9, 2]}),
    _fwd("packed_page_1: a page a token", {**_PACKED, "page_size": 1, "lengths": [9, 3], "new": [9, 2], "padding": 1}),
    _fwd("packed_contiguous: a page is a sequence", {**_PACKED, "page_size": None, "lengths": [6, 9], "new": 1}),
    _fwd(
        "packed_special: NaN and infinities",
        {**_PACKED, "lengths": [9, 3], "new": [9, 2], "special": True, "padding": 1},
    ),
    _fwd("packed_tiny: amax below the floor", {**_PACKED, "lengths": [4], "new": 3, "scale": 1e-7}),
    _fwd("empty: no tokens", {**_SMALL, "lengths": [4, 2], "new": 0}),
    _fwd("no_sequences: an empty batch", {**_SMALL, "lengths": [], "new": 1}),
)


def _bad(name: str, match: str, change: Callable[[dict[str, Any]], object], **params: Any) -> BadInput:
    """A small call with `change` caches to its arguments."""

    def make(device: torch.device) -> Sample:
        sample = inputs({**_SMALL, "lengths": [5, 6], "new": [2, 1], **params}, torch.bfloat16, device, 0)
        names = ("kv_cache", "c_kv", "k_pe", "lengths")
        arguments = {**dict(zip(names, sample.args, strict=True)), **sample.kwargs}
        change(arguments)
        return Sample(tuple(arguments.pop(name) for name in names), arguments)

    return BadInput(name, make, match)


def _moved(arguments: dict[str, Any]) -> None:
    """A column of the latents counted to the rotated parts."""
    joined = torch.cat((arguments["c_kv"], arguments["k_pe"]), -1)
    arguments["c_kv"], arguments["k_pe"] = joined[:, :511], joined[:, 511:]


BAD_INPUTS = (
    _bad("a list", "kv_cache is a list", replaced("kv_cache", lambda t: [1.0])),
    _bad(
        "a cache of heads",
        r"needs \(pages, page_size, D\)",
        replaced("kv_cache", lambda t: t[:, :, None].repeat(1, 1, 2, 1)),
    ),
    _bad("integers", "kv_cache is .*int32", replaced("kv_cache", lambda t: t.to(torch.int32))),
    _bad(
        "bytes of another width", f"or tokens of {TOKEN_BYTES} bytes", replaced("kv_cache", lambda t: t.to(torch.uint8))
    ),
    _bad("another dtype", "k_pe is torch.float32", replaced("k_pe", Tensor.float)),
    _bad("too few columns", r"\(31, 16\) columns.*a sum of 48", replaced("c_kv", lambda t: t[:, 1:])),
    _bad("heads of tokens", r"c_kv is \(3, 1, 32\); needs packed tokens", replaced("c_kv", lambda t: t[:, None])),
    _bad("fewer rotated parts", r"k_pe is \(2, 16\); needs packed tokens \(3, D\)", replaced("k_pe", lambda t: t[1:])),
    _bad("other parts of a packed token", r"\(511, 65\) columns.*needs \(512, 64\)", _moved, **_PACKED),
    _bad("expanded cache", "kv_cache is expanded", replaced("kv_cache", lambda t: t[:1].expand(t.shape))),
    _bad("int64 lengths", r"lengths is \(2,\) torch.int64; needs int32", replaced("lengths", Tensor.long)),
    _bad("int64 table", "block_table is .* torch.int64; needs int32", replaced("block_table", Tensor.long)),
    _bad("sequences without pages", "each sequence has its own", lambda a: a.pop("block_table")),
    _bad("tokens that do not divide", "3 tokens for 2 sequences", lambda a: a.pop("cu_seqlens")),
)
