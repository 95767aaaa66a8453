"""Random problems of `mla_decode`, its edge cases, and calls that must fail."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.attention.paged.samples import TAIL, int32, page_tables
from tilewright.ops.kvcache.mla_layout import TOKEN_BYTES, quantize_mla_cache

_OPTIONS = ("causal", "scale", "d_v", "return_lse")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: H, D, d_v, lengths (of each sequence); optional S_q (new tokens of each; without it q is (B, H, D)),
    page (tokens of one; None: contiguous caches), capacity (of contiguous caches), shared (leading pages that all
    sequences share), cache ("e4m3": tokens of 656 bytes), unused ("nan": slots that hold no token are NaN), topk (each
    token sees so many of its sequence's slots, some twice, some -1), topk_lengths (lengths beside them), causal, scale,
    sinks, return_lse.

    Pages lie in any order, some belong to no sequence, and the table goes on behind the last page with what is none.
    """
    g = rows.generator(seed)
    lengths, d, page = params["lengths"], params["D"], params.get("page")
    batch, each = len(lengths), params.get("S_q")
    q = rows.random_tensor((batch, *((each,) if each else ()), params["H"], d), dtype, device, g)
    options = {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    if page is None:
        capacity = max(params.get("capacity") or 0, *lengths, 1)
        size = (batch, capacity)
        tables = [[b] for b in range(batch)]
    else:
        tables, count = page_tables(lengths, page, params.get("shared") or 0, seed)
        size = (count, page)
        width = max(map(len, tables), default=0) + 1
        if not params.get("topk"):
            table = [t + [TAIL] * (width - len(t)) for t in tables]
            options["block_table"] = int32(table, device, (-1, width))
    slots = []
    if params.get("topk") or params.get("unused") == "nan":  # of long sequences a list of all takes seconds
        n_page = size[1]
        slots = [[t[i // n_page] * n_page + i % n_page for i in range(n)] for t, n in zip(tables, lengths, strict=True)]
    kv_cache = _cache(params, size, slots, dtype, device, g)
    lengths_given: Tensor | None = int32(lengths, device)
    if params.get("topk"):
        options["indices"] = _indices(slots, each or 1, params["topk"], device, g)
        counts = params.get("topk_lengths")
        lengths_given = None if counts is None else int32(counts, device)
    if params.get("sinks"):
        options["sinks"] = rows.random_tensor((params["H"],), torch.float32, device, g)
    return Sample((q, kv_cache, lengths_given), options)


def _cache(
    params: Mapping[str, Any],
    size: tuple[int, int],
    slots: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    g: torch.Generator,
) -> Tensor:
    values = rows.random_tensor((*size, params["D"]), dtype, device, g)
    is_packed = params.get("cache") == "e4m3"
    cache = quantize_mla_cache(values) if is_packed else values
    if params.get("unused") == "nan":  # bytes of ones are NaN in each of the three dtypes of a token
        used = torch.zeros(size[0] * size[1], dtype=torch.bool, device=device)
        used[torch.tensor([slot for each in slots for slot in each], dtype=torch.int64, device=device)] = True
        cache = torch.where(used.view(*size, 1), cache, 255 if is_packed else torch.nan)
    return cache


def _indices(
    slots: Sequence[Sequence[int]], tokens: int, topk: int, device: torch.device, g: torch.Generator
) -> Tensor:
    """(B, tokens, topk): random slots of each sequence, any of them twice, and -1 for one in eight."""
    indices = torch.full((len(slots), tokens, topk), -1, dtype=torch.int32)
    for row, numbers in zip(indices, slots, strict=True):
        if numbers:
            chosen = torch.tensor(numbers, dtype=torch.int32)[torch.randint(len(numbers), (tokens, topk), generator=g)]
            row.copy_(torch.where(torch.rand((tokens, topk), generator=g) < 0.125, -1, chosen))
    return indices.to(device)


_SMALL = {"H": 4, "D": 48, "d_v": 32, "lengths": (37, 1, 64, 21), "page": 16}
_MODEL = {"D": 576, "d_v": 512, "lengths": (37, 1, 70)}


def _case(name: str, **params: Any) -> Workload:
    return Workload(name, {**_SMALL, **params}, directions=("fwd",))


EDGE_CASES = (
    _case("pages: shorter than a tile, one not full"),
    _case("contiguous: no table", page=None, capacity=70),
    _case("contiguous_tokens: several of each", page=None, S_q=2, H=8),
    _case("tokens: the last of several sees the last key", S_q=3, unused="nan"),
    _case("full: every token sees every key", S_q=2, causal=False),
    _case("short: fewer keys than new tokens", S_q=5, lengths=(3, 0, 5, 70), return_lse=True),
    _case("empty_sequences: o is 0, lse -inf", lengths=(0, 21, 0), return_lse=True, unused="nan"),
    _case("nothing: no sequence has keys", lengths=(0, 0), page=4),
    _case("page_1: a page for each token", page=1, unused="nan"),
    _case("page_3: no power of two", page=3, S_q=2, unused="nan"),
    _case("page_64: a tile is a page", page=64, lengths=(64, 130, 63), unused="nan"),
    _case("page_256: more than a tile", page=256, lengths=(300, 5), unused="nan"),
    _case("long: several splits", lengths=(700, 40), page=32, return_lse=True),
    _case("shared: one prefix", page=4, shared=3),
    _case("sinks: also of sequences without keys", sinks=True, lengths=(20, 0, 5), return_lse=True),
    _case("negative_scale: the least is the largest", scale=-0.3),
    _case("head: of one", H=1),
    _case("heads_9: a tile not full", H=9, S_q=2),
    _case("heads_80: more than a tile", H=80, lengths=(40, 9)),
    _case("d_v_is_d: values are whole tokens", D=32, d_v=32),
    _case("d_36: rows at no multiple of 16 bytes", D=36, d_v=20),
    _case("d_544: two powers of two of values", D=544, d_v=384, lengths=(20, 9)),
    _case("model: of 576 columns", **_MODEL, unused="nan"),
    _case("model_heads: in the largest tile", **_MODEL, H=64, S_q=2),
    _case("packed: 656 bytes a token", **_MODEL, cache="e4m3", unused="nan"),
    _case("packed_contiguous: and several tokens", **_MODEL, cache="e4m3", page=None, S_q=2, H=16),
    _case("sparse: slots, twice or none", topk=20, S_q=2, unused="nan", return_lse=True),
    _case("sparse_lengths: the first indices alone", topk=20, topk_lengths=(3, 0, 20, 99), unused="nan"),
    _case("sparse_contiguous: slots of all sequences", topk=7, page=None, sinks=True),
    _case("sparse_packed: of 656 bytes", **_MODEL, topk=33, cache="e4m3", S_q=2, H=16, unused="nan"),
    _case("sparse_empty: no sequence has keys", topk=5, lengths=(0, 0), page=4, return_lse=True),
    _case("empty: no sequences", lengths=()),
)

EDGE_GRID: Mapping[str, Any] = {
    "lengths": ((), (0,), (1,), (2, 0), (15, 16, 17), (63, 64, 65), (1, 0, 129), (17, 17, 17)),
    "page": (None, 1, 3, 16, 64),
    "S_q": (None, 1, 2, 5, 8),
    "H": (1, 3, 16, 17, 63, 64, 65, 128),
    "D": (48,),
    "d_v": (16, 32, 48),
    "topk": (None, None, 1, 17),
    "sinks": (None, None, True),
}
"""Lengths beside a tile and a page, heads beside a tile of rows."""


def _sample(device: torch.device, change: Mapping[str, Any]) -> Sample:
    """q (2, 4, 16), five pages of 4 tokens, two sequences; with changes."""
    q = torch.ones(change.get("q", (2, 4, 16)), device=device).to(change.get("q_dtype", torch.float32))
    cache = torch.ones(change.get("cache", (5, 4, 16)), device=device).to(change.get("cache_dtype", torch.float32))
    lengths = change["lengths"] if "lengths" in change else int32((3, 5), device)
    options = {"d_v": 8, "block_table": int32([[0, 1], [2, 3]], device, (2, 2)), **change.get("options", {})}

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    kwargs = {name: there(value) for name, value in options.items() if value is not None}
    return Sample((q, cache, there(lengths)), kwargs)


def _bad(name: str, match: str, **change: Any) -> BadInput:
    return BadInput(name, lambda device: _sample(device, change), match)


_INDICES = torch.zeros(2, 1, 3, dtype=torch.int32)
BAD_INPUTS = (
    _bad("integers", "q is torch.int32", q_dtype=torch.int32),
    _bad("two dimensions", r"needs \(B, S_q, H, D\)", q=(2, 16)),
    _bad("nine tokens", "S_q is 1 to 8", q=(2, 9, 4, 16)),
    _bad("a cache of heads", r"kv_cache is \(5, 4, 2, 16\); needs", cache=(5, 4, 2, 16)),
    _bad("D differs", "must agree in D", cache=(5, 4, 32)),
    _bad("pages of nothing", "at least one token", cache=(5, 0, 16)),
    _bad("a cache in another dtype", "the cache has the dtype of q", cache_dtype=torch.bfloat16),
    _bad("bytes of another width", f"tokens of {TOKEN_BYTES} bytes", cache_dtype=torch.uint8),
    _bad("bytes for another D", "has D = 576 and d_v = 512", cache=(5, 4, TOKEN_BYTES), cache_dtype=torch.uint8),
    _bad("values wider than tokens", "d_v is 17; needs 1 to D = 16", options={"d_v": 17}),
    _bad("values of no column", "d_v is 0", options={"d_v": 0}),
    _bad("no lengths", "lengths is None", lengths=None),
    _bad("lengths of 64 bits", "lengths is .*int64", lengths=torch.tensor([3, 5])),
    _bad("lengths in a list", "lengths is a list", lengths=[3, 5]),
    _bad("lengths of other sequences", r"lengths is \(3,\)", lengths=torch.zeros(3, dtype=torch.int32)),
    _bad("a table of 64 bits", "block_table is .*int64", options={"block_table": torch.zeros(2, 2).long()}),
    _bad("contiguous caches of another batch", "Give a block_table", options={"block_table": None}),
    _bad("indices beside a table", "give no block_table", options={"indices": _INDICES}),
    _bad("indices of 64 bits", "indices is .*int64", options={"block_table": None, "indices": _INDICES.long()}),
    _bad("indices without tokens", r"indices is \(2, 3\)", options={"block_table": None, "indices": _INDICES[:, 0]}),
    _bad("infinite scale", "needs a finite number", options={"scale": float("inf")}),
    _bad("sinks of other heads", r"sinks is \(2,\)", options={"sinks": torch.ones(2)}),
)
