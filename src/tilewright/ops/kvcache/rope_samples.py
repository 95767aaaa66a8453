"""Problems of `rope_kv_append_`, and calls that must fail."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.kvcache.samples import problem, replaced, tokens_of
from tilewright.ops.rope.tables import inverse_frequencies

_NAMES = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "lengths")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `samples.problem`, H, optional norm, eps, R, half (tables), table_dtype, positions."""
    caches = problem(params, dtype, device, seed)
    rng = rows.generator(seed + 1)
    h, h_kv, d, d_v = params["H"], params["H_kv"], caches.k_cache.shape[3], caches.v_cache.shape[3]
    tokens = tokens_of(params, caches.new)
    widths = [h * d, h_kv * d, h_kv * d_v]
    qkv = rows.random_tensor((tokens, sum(widths)), dtype, device, rng)
    q, k, v = qkv.split(widths, 1)
    q, k, v = q.view(tokens, h, d), k.view(tokens, h_kv, d), v.view(tokens, h_kv, d_v)
    r = params.get("R", d)
    tables = _tables(max([1, *params["lengths"]]) + 3, r, params, dtype, device)
    options: dict[str, Any] = dict(caches.options)
    if params.get("half"):
        options["rotary_dim"] = r
    if params.get("norm"):
        options["q_weight"], options["k_weight"] = (rows.random_tensor((d,), dtype, device, rng) for _ in range(2))
        options["eps"] = params.get("eps", 1e-6)
    if params.get("positions"):
        drawn = torch.randint(0, tables[0].shape[0], (tokens,), generator=rng)
        options["positions"] = drawn.to(device=device, dtype=torch.int32)
    return Sample((q, k, v, *tables, caches.k_cache, caches.v_cache, caches.lengths), options)


def _tables(
    length: int, r: int, params: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] * inverse_frequencies(r)[None, :].float()
    angles = angles if params.get("half") else torch.cat((angles, angles), -1)
    table_dtype = params.get("table_dtype", dtype)
    return angles.cos().to(device=device, dtype=table_dtype), angles.sin().to(device=device, dtype=table_dtype)


def _fwd(name: str, params: Mapping[str, Any]) -> Workload:
    return Workload(name, params, directions=("fwd",))


_LLAMA_8B = {"H": 32, "H_kv": 8, "D": 128, "page_size": 16}
_QWEN3_8B = {**_LLAMA_8B, "norm": True}
_QWEN3_30B = {"H": 32, "H_kv": 4, "D": 128, "page_size": 64, "norm": True}
_SMALL = {"H": 4, "H_kv": 2, "D": 16, "page_size": 4}
_EVEN = [1024] * 8
_PREFILL = {"lengths": _EVEN, "new": _EVEN}
WORKLOADS = (
    _fwd("llama8b_prefill_8k", {**_LLAMA_8B, **_PREFILL}),
    _fwd("qwen3_8b_prefill_8k", {**_QWEN3_8B, **_PREFILL}),
    _fwd("qwen3_8b_prefill_ragged", {**_QWEN3_8B, "lengths": [5000, 17, 1175, 2000], "new": [5000, 17, 1175, 2000]}),
    _fwd("qwen3_8b_prefill_e4m3_heads", {**_QWEN3_8B, **_PREFILL, "scales": "head"}),
    _fwd("qwen3_30b_prefill_e4m3_tokens", {**_QWEN3_30B, **_PREFILL, "scales": "token"}),
    _fwd("qwen3_30b_prefill_8k", {**_QWEN3_30B, **_PREFILL}),
    _fwd("glm9b_prefill_8k", {"H": 32, "H_kv": 2, "D": 128, "R": 64, "page_size": 16, **_PREFILL}),
    *(_fwd(f"llama8b_decode_{b}", {**_LLAMA_8B, "lengths": [128] * b, "new": 1}) for b in (1, 16, 64, 256)),
    *(_fwd(f"qwen3_8b_decode_{b}", {**_QWEN3_8B, "lengths": [128] * b, "new": 1}) for b in (1, 16, 64)),
)
CPU_WORKLOADS = (
    Workload(
        "small",
        {"H": 8, "H_kv": 2, "D": 64, "page_size": 16, "lengths": [128] * 4, "new": 128},
        (torch.bfloat16, torch.float32),
    ),
)
_RAGGED = {"lengths": [9, 3, 12], "new": [9, 0, 5]}
_DECODE = {"lengths": [4, 5, 1, 8], "new": 1}
EDGE_CASES = (
    _fwd("decode: one new token each, on both sides of a page's end", {**_SMALL, **_DECODE}),
    _fwd("ragged: more tokens than a program takes", {**_SMALL, "lengths": [9, 3, 30], "new": [9, 0, 23]}),
    _fwd("norm: of every head, as in Qwen3", {**_SMALL, **_RAGGED, "norm": True}),
    _fwd("norm_eps: eps dominates nothing and stays", {**_SMALL, **_DECODE, "norm": True, "eps": 0.5}),
    _fwd("odd_page: pages of 3 tokens, odd heads", {**_SMALL, **_RAGGED, "H": 9, "H_kv": 3, "page_size": 3}),
    _fwd("page_1: a page a token", {**_SMALL, "page_size": 1, "lengths": [3, 1], "new": [2, 1]}),
    _fwd("contiguous: a page is a sequence", {**_SMALL, "page_size": None, "lengths": [6, 9, 1], "new": 1}),
    _fwd("padding: rows of q' are 0", {**_SMALL, "lengths": [5, 0, 6], "new": [2, 0, 1], "padding": 4, "norm": True}),
    _fwd("left_out: a captured batch with sequences of length 0", {**_SMALL, "lengths": [0, 5, 0], "new": 1}),
    _fwd("partial: the rest is normalised, and not rotated", {**_SMALL, **_RAGGED, "D": 20, "R": 8, "norm": True}),
    _fwd("partial_e4m3: the rest counts in amax", {**_SMALL, **_RAGGED, "D": 20, "R": 8, "scales": "token"}),
    _fwd("d_80: halves are no power of two, another D of v", {**_SMALL, **_DECODE, "D": 80, "D_v": 24, "norm": True}),
    _fwd("r_2: a single pair", {**_SMALL, **_DECODE, "D": 2, "H": 1, "H_kv": 1}),
    _fwd("half_tables: one column a pair", {**_SMALL, **_DECODE, "D": 64, "half": True}),
    _fwd("float32_tables: float32 arithmetic", {**_SMALL, **_RAGGED, "table_dtype": torch.float32, "norm": True}),
    _fwd("positions: other angles than those of the cache", {**_SMALL, **_RAGGED, "positions": True}),
    _fwd("heads_first: strides of another layout", {**_SMALL, **_DECODE, "heads_first": True}),
    _fwd("e4m3_heads: given scales", {**_SMALL, **_RAGGED, "scales": "head", "norm": True}),
    _fwd("e4m3_tokens: scales of the rotated k, and of v", {**_SMALL, **_RAGGED, "scales": "token", "D": 24}),
    _fwd("empty: no tokens", {**_SMALL, "lengths": [4, 2], "new": 0}),
    _fwd("no_sequences: an empty batch", {**_SMALL, "lengths": [], "new": 1}),
)


def _bad(name: str, match: str, change: Callable[[dict[str, Any]], object], **params: Any) -> BadInput:
    """A small call with `change` made to its arguments."""

    def make(device: torch.device) -> Sample:
        sizes = {**_SMALL, "lengths": [5, 6], "new": [2, 1], "norm": True, **params}
        sample = inputs(sizes, torch.bfloat16, device, 0)
        arguments = {**dict(zip(_NAMES, sample.args, strict=True)), **sample.kwargs}
        change(arguments)
        return Sample(tuple(arguments.pop(name) for name in _NAMES), arguments)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("int64 lengths", r"lengths is \(2,\) torch.int64; needs int32", replaced("lengths", Tensor.long)),
    _bad("int64 positions", "positions is .* needs int32", replaced("positions", Tensor.long), positions=True),
    _bad("too few positions", r"needs int32, \(3,\)", replaced("positions", lambda t: t[1:]), positions=True),
    _bad("another dtype", "v is torch.float32", replaced("v", Tensor.float)),
    _bad("another D", "one D of q and k", replaced("q", lambda t: t[..., :8])),
    _bad("batched", r"q is \(1, 3, 4, 16\); needs packed tokens", replaced("q", lambda t: t[None])),
    _bad("one weight", "needs both, or neither", lambda a: a.pop("k_weight")),
    _bad("weight too short", r"q_weight is \(7,\) .* needs \(16,\)", replaced("q_weight", lambda t: t[:7])),
    _bad("float32 weight", "k_weight is .* torch.float32", replaced("k_weight", Tensor.float)),
    _bad("rows a token", "needs a table", lambda a: a.update(cos=a["cos"][None], sin=a["sin"][None])),
    _bad("odd rotary_dim", "needs an even rotary_dim", lambda a: a.update(rotary_dim=3)),
    _bad("wide table", "from 2 to D", lambda a: a.update(cos=a["cos"].repeat(1, 2), sin=a["sin"].repeat(1, 2))),
    _bad("sin of another dtype", "one shape and dtype", replaced("sin", Tensor.float)),
    _bad("not a tensor", "cos is a list", replaced("cos", lambda t: [1.0])),
    _bad("e4m3 without scales", "float8_e4m3fn needs both", lambda a: a.pop("v_scale"), scales="head"),
    _bad("expanded cache", "v_cache is expanded", replaced("v_cache", lambda t: t[:1].expand(t.shape))),
)
