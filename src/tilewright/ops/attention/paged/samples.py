"""Random problems of `fmha_decode` and `fmha_paged`, their edge cases, and calls that must fail."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.quant.numbers import E4M3

TAIL = 2147480000
"""What stands in a table behind the pages of a sequence: no page, and beyond 32 bits times any stride."""
_OPTIONS = ("causal", "window", "scale", "softcap", "return_lse")


def decode_inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: H, D, lengths (of each sequence); optional S_q (new tokens of each; without it q is (B, H, D)) and those
    of `cache_of`; causal, window, scale, softcap, sinks, return_lse.
    """
    g = rows.generator(seed)
    lead = (len(params["lengths"]), *((params["S_q"],) if params.get("S_q") else ()))
    q = rows.random_tensor((*lead, params["H"], params["D"]), dtype, device, g)
    tensors, options = _rest(params, dtype, device, g, seed)
    return Sample((q, *tensors), options)


def paged_inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """The same with `new`, the new tokens of each sequence, in place of S_q; behind: tokens after the last one."""
    g = rows.generator(seed)
    tokens = sum(params["new"]) + params.get("behind", 0)
    q = rows.random_tensor((tokens, params["H"], params["D"]), dtype, device, g)
    (k_cache, v_cache, lengths), options = _rest(params, dtype, device, g, seed)
    return Sample((q, k_cache, v_cache, int32(accumulate(params["new"], initial=0), device), lengths), options)


def _rest(
    params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, g: torch.Generator, seed: int
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """(k_cache, v_cache, lengths) and options."""
    options = {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    k_cache, v_cache, more = cache_of(params, dtype, device, g, seed)
    if params.get("sinks"):
        options["sinks"] = rows.random_tensor((params["H"],), torch.float32, device, g)
    return (k_cache, v_cache, int32(params["lengths"], device)), {**options, **more}


def cache_of(
    params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, g: torch.Generator, seed: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(k_cache, v_cache, what goes with them).  params: H_kv, D_v; page (tokens of one; None: contiguous caches);
    capacity (of contiguous caches); shared (leading pages that all sequences share, those of the first); cache
    ("e4m3"), token_scales (a scale for each token and head); unused ("nan": slots that hold no token are NaN).

    Pages lie in any order, some belong to no sequence, and the table goes on behind the last page with what is none.
    """
    heads, d = params.get("H_kv") or params["H"], params["D"]
    lengths, page = params["lengths"], params.get("page")
    more: dict[str, Tensor] = {}
    if page is None:
        page = max(params.get("capacity") or 0, *lengths, 1)
        tables, size = [[b] for b in range(len(lengths))], (len(lengths), page)
    else:
        tables, count = page_tables(lengths, page, params.get("shared") or 0, seed)
        size = (count, page)
        width = max(map(len, tables), default=0) + 1
        more["block_table"] = int32([table + [TAIL] * (width - len(table)) for table in tables], device, (-1, width))
    is_e4m3 = params.get("cache") == "e4m3"
    caches = []
    for name, width in (("k_scale", d), ("v_scale", params.get("D_v") or d)):
        values = rows.random_tensor((*size, heads, width), dtype, device, g)
        if params.get("unused") == "nan":
            used = [t[i // page] * page + i % page for t, n in zip(tables, lengths, strict=True) for i in range(n)]
            used_slots = torch.zeros(size[0] * size[1], dtype=torch.bool, device=device)
            used_slots[torch.tensor(used, dtype=torch.int64, device=device)] = True
            values = torch.where(used_slots.view(*size, 1, 1), values, torch.nan)
        caches.append(values.to(E4M3) if is_e4m3 else values)
        if is_e4m3:
            lead = size if params.get("token_scales") else ()
            more[name] = torch.exp2(2 * torch.rand((*lead, heads), generator=g) - 1).to(device)
    k_cache, v_cache = caches
    return k_cache, v_cache, more


def page_tables(lengths: Sequence[int], page: int, shared: int, seed: int) -> tuple[list[list[int]], int]:
    """The pages of each sequence, in any order, and how many there are; one in eight belongs to no sequence."""
    counts = [-(-n // page) for n in lengths]
    total = sum(counts) + sum(counts) // 8 + 1
    order = _permutation(total, seed)
    tables = [order[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
    for table in tables[1:]:
        common = min(shared, len(table), len(tables[0]))
        table[:common] = tables[0][:common]
    return tables, total


@lru_cache(maxsize=1)
def _permutation(n: int, seed: int) -> list[int]:
    """0 to n - 1 in any order; of long caches it takes longer than all else of a problem, and most ask for it twice."""
    return Random(seed).sample(range(n), n)[::-1]


def int32(numbers: Any, device: torch.device | str, shape: tuple[int, ...] = (-1,)) -> Tensor:
    """A tensor of integers."""
    return torch.tensor(list(numbers), dtype=torch.int32, device=device).view(shape)


_SMALL = {"H": 4, "H_kv": 2, "D": 32, "lengths": (37, 1, 64, 21), "page": 16}


def _case(name: str, **params: Any) -> Workload:
    return Workload(name, {**_SMALL, **params}, directions=("fwd",))


def _chunks(name: str, new: Sequence[int], **params: Any) -> Workload:
    return Workload(name, {**_SMALL, "new": tuple(new), **params}, directions=("fwd",))


DECODE_CASES = (
    _case("pages: shorter than a tile, one not full"),
    _case("contiguous: no table", page=None, capacity=70),
    _case("contiguous_tokens: several of each", page=None, S_q=2, H=8),
    _case("contiguous_group: and many heads", page=None, S_q=2, H=16, H_kv=1),
    _case("tokens: the last of several sees the last key", S_q=3),
    _case("full: every token sees every key", S_q=2, causal=False),
    _case("short: fewer keys than new tokens", S_q=5, lengths=(3, 0, 5, 70)),
    _case("empty_sequences: o is 0, lse -inf", lengths=(0, 21, 0), return_lse=True, unused="nan"),
    _case("nothing: no sequence has keys", lengths=(0, 0), page=4),
    _case("page_1: a page for each token", page=1, unused="nan"),
    _case("page_3: no power of two", page=3, S_q=2, unused="nan"),
    _case("page_64: a tile is a page", page=64, lengths=(64, 130, 63), unused="nan"),
    _case("page_256: more than a tile", page=256, lengths=(300, 5), unused="nan"),
    _case("long: several splits", lengths=(700, 40), D=16, page=32, return_lse=True),
    _case("shared: one prefix", page=4, shared=3),
    _case("window: from within a page", window=(9, 0), S_q=2, lengths=(37, 5, 64, 150), unused="nan"),
    _case("window_0: the token itself", window=(0, 0)),
    _case("sinks: also of sequences without keys", sinks=True, lengths=(20, 0, 5), return_lse=True),
    _case("softcap: before the mask", softcap=1.5, scale=0.4, S_q=2),
    _case("negative_scale: the least is the largest", scale=-0.3),
    _case("mqa: one key head", H=6, H_kv=1, S_q=2),
    _case("mha: a key head each", H=3, H_kv=3),
    _case("group_16: a tile of heads", H=16, H_kv=1, S_q=8, lengths=(40, 9)),
    _case("d_80: no power of two", D=80),
    _case("d_v: values are narrower", D=96, D_v=64),
    _case("d_v_wider: or wider", D=32, D_v=48, page=None),
    _case("d_256: wide heads", D=256, H=2, H_kv=1, lengths=(40, 33)),
    _case("d_36: rows at no multiple of 16 bytes", D=36),
    _case("d_36_tokens: in larger tiles", D=36, S_q=8, H=8),
    _case("d_36_group: and in the largest", D=36, H=16, H_kv=1, S_q=8, lengths=(40, 9)),
    _case("e4m3: a scale for each head", cache="e4m3", D=64),
    _case("e4m3_tokens: and for each token", cache="e4m3", token_scales=True, D=64, S_q=2, unused="nan"),
    _case("e4m3_contiguous: odd width", cache="e4m3", page=None, D=40),
    _case("empty: no sequences", lengths=()),
)
PAGED_CASES = (
    _chunks("mixed: decoding beside chunks", (1, 1, 30, 21)),
    _chunks("contiguous: no table", (2, 0, 64, 9), page=None),
    _chunks("contiguous_group: heads in a tile", (2, 0, 40, 9), page=None, H=8, H_kv=1),
    _chunks("contiguous_heads: more of them", (2, 0, 40, 9), page=None, H=16, H_kv=1),
    _chunks("behind: tokens of no sequence", (1, 1, 30, 4), behind=23, return_lse=True),
    _chunks("prefill: all tokens are new", (37, 1, 64, 21), unused="nan"),
    _chunks("late: a chunk behind a prefix", (1, 40), lengths=(50, 170), D=64, page=64, unused="nan"),
    _chunks("full: every token sees every key", (1, 1, 30, 4), causal=False),
    _chunks("more_tokens: than keys", (3, 9, 40, 5), lengths=(2, 0, 11, 5), return_lse=True),
    _chunks("empty_sequences: without tokens", (0, 0, 20, 0), behind=1),
    _chunks("no_sequence: nothing but tokens behind", (), lengths=(), behind=5),
    _chunks("page_1: a page for each token", (1, 1, 30, 4), page=1, unused="nan"),
    _chunks("page_3: no power of two", (1, 1, 30, 4), page=3, unused="nan"),
    _chunks("shared: one prefix", (1, 1, 30, 4), page=4, shared=3),
    _chunks("window: within chunks", (2, 1, 50, 4), window=(9, 0), unused="nan"),
    _chunks("sinks: also of tokens that see nothing", (1, 1, 30, 4), sinks=True, behind=2, lengths=(5, 0, 64, 9)),
    _chunks("softcap: before the mask", (1, 1, 30, 4), softcap=1.5, scale=0.4),
    _chunks("mqa: one key head", (1, 1, 17, 4), H=6, H_kv=1),
    _chunks("mha: a key head each", (1, 1, 40, 4), H=3, H_kv=3),
    _chunks("d_v: values are narrower", (1, 1, 30, 4), D=96, D_v=64),
    _chunks("d_256: wide heads", (1, 1, 30, 4), D=256, H=2, H_kv=1),
    _chunks("d_36: rows at no multiple of 16 bytes", (1, 1, 30, 4), D=36),
    _chunks("d_36_group: in larger tiles", (1, 1, 30, 4), D=36, H=8, H_kv=1),
    _chunks("d_36_heads: and in the largest", (1, 1, 30, 4), D=36, H=16, H_kv=1),
    _chunks("e4m3: a scale for each head", (1, 1, 30, 4), cache="e4m3", D=64),
    _chunks("e4m3_tokens: and for each token", (1, 1, 30, 4), cache="e4m3", token_scales=True, D=64, unused="nan"),
    _chunks("empty: no tokens", (0, 0, 0, 0)),
)

_PAGES = (None, 1, 3, 16, 64)
_LENGTHS = ((), (0,), (1,), (2, 0), (15, 16, 17), (63, 64, 65), (1, 0, 129), (17, 17, 17))
DECODE_GRID: Mapping[str, Any] = {
    "lengths": _LENGTHS,
    "page": _PAGES,
    "S_q": (None, 1, 2, 5, 8),
    "sinks": (None, None, True),
    "softcap": (None, None, 1.5),
    "window": (None, None, (9, 0)),
}
PAGED_GRID: Mapping[str, Any] = {
    "lengths": _LENGTHS,
    "new": lambda params: [
        tuple(max(n - 3, 0) for n in params["lengths"]),
        tuple((1, 40, 0)[i % 3] for i, _ in enumerate(params["lengths"])),
    ],
    "page": _PAGES,
    "sinks": (None, None, True),
    "softcap": (None, None, 1.5),
    "window": (None, None, (9, 0)),
}
"""Lengths beside a tile and a page, with few new tokens and many."""

_SHAPES = {"q": (2, 4, 16), "k_cache": (5, 4, 2, 16), "v_cache": (5, 4, 2, 16)}


def _sample(device: torch.device, change: Mapping[str, Any], packed: bool) -> Sample:
    """q (2, 4, 16), five pages of 4 tokens of 2 key heads, two sequences; with changes."""
    tensors = [
        torch.ones(change.get(n, shape), device=device).to(change.get(f"{n}_dtype", torch.float32))
        for n, shape in _SHAPES.items()
    ]
    if packed:
        tensors.append(change["starts"] if "starts" in change else int32((0, 1, 2), device))
    tensors.append(change["lengths"] if "lengths" in change else int32((3, 5), device))
    options = {"block_table": int32([[0, 1], [2, 3]], device, (2, 2)), **change.get("options", {})}

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    kwargs = {name: there(value) for name, value in options.items() if value is not None}
    return Sample(tuple(there(t) for t in tensors), kwargs)


def _bad(name: str, match: str, packed: bool = False, **change: Any) -> BadInput:
    return BadInput(name, lambda device: _sample(device, change, packed), match)


def _both(packed: bool) -> tuple[BadInput, ...]:
    """What both ops refuse."""
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("integers", "q is torch.int32", {"q_dtype": torch.int32}),
        ("caches of three dimensions", "k_cache is .*; needs", {"k_cache": (5, 4, 16)}),
        ("other pages of values", "must agree in pages", {"v_cache": (4, 4, 2, 16)}),
        ("D differs", "must agree in D", {"k_cache": (5, 4, 2, 32)}),
        ("heads in no groups", "must be a multiple", {"q": (2, 3, 16)}),
        ("pages of nothing", "at least one token", {"k_cache": (5, 0, 2, 16), "v_cache": (5, 0, 2, 16)}),
        ("caches in another dtype", "caches have the dtype of q", {"k_cache_dtype": torch.bfloat16}),
        ("e4m3 without scales", "k_scale is missing", {"k_cache_dtype": E4M3, "v_cache_dtype": E4M3}),
        ("scales without e4m3", "v_scale is given", {"options": {"v_scale": torch.ones(2)}}),
        ("scales of query heads", r"k_scale is \(4,\)", {
            "k_cache_dtype": E4M3, "v_cache_dtype": E4M3,
            "options": {"k_scale": torch.ones(4), "v_scale": torch.ones(2)}}),
        ("a table of 64 bits", "block_table is .*int64", {"options": {"block_table": torch.zeros(2, 2).long()}}),
        ("a table of other sequences", r"block_table is \(3, 2\)", {"options": {
            "block_table": torch.zeros(3, 2, dtype=torch.int32)}}),
        ("contiguous caches of another batch", "Give a block_table", {"options": {"block_table": None}}),
        ("lengths of 64 bits", "lengths is .*int64", {"lengths": torch.tensor([3, 5])}),
        ("lengths in a list", "lengths is a list", {"lengths": [3, 5]}),
        ("a window of one number", "window is 4", {"options": {"window": 4}}),
        ("a window to the right", "its right side is 0", {"options": {"window": (4, 1)}}),
        ("a negative window", "left is a number of keys", {"options": {"window": (-1, 0)}}),
        ("softcap of zero", "positive finite number", {"options": {"softcap": 0.0}}),
        ("infinite scale", "needs a finite number", {"options": {"scale": float("inf")}}),
        ("sinks of key heads", r"sinks is \(2,\)", {"options": {"sinks": torch.ones(2)}}),
    )  # fmt: skip
    return tuple(_bad(name, match, packed, **change) for name, match, change in cases)


DECODE_BAD_INPUTS = (
    *_both(False),
    _bad("nine tokens", "S_q is 1 to 8. For more, call fmha_paged", q=(2, 9, 4, 16)),
    _bad("two dimensions", r"needs \(B, S_q, H, D\)", q=(2, 16)),
    _bad("lengths of other sequences", r"lengths is \(3,\)", lengths=torch.zeros(3, dtype=torch.int32)),
)
PAGED_BAD_INPUTS = (
    *_both(True),
    _bad("four dimensions", r"q is \(1, 2, 4, 16\); needs \(T, H, D\)", True, q=(1, 2, 4, 16)),
    _bad("no starts", "cu_seqlens_q is a NoneType", True, starts=None),
    _bad("starts of other sequences", r"cu_seqlens_q is \(2,\)", True, starts=torch.zeros(2, dtype=torch.int32)),
)
