"""Random problems of `fmha_varlen`, its edge cases, and calls that must fail."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.attention import score

_OPTIONS = ("causal", "window", "scale", "softcap", "return_lse")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: H, D, lengths (of each sequence's queries); optional H_kv, D_v, lengths_k (of its keys), behind (tokens
    after the last sequence); causal, window; alibi, sinks, scale, softcap, return_lse; packed (views of one
    projection).
    """
    g = rows.generator(seed)
    heads, d, tail = params["H"], params["D"], params.get("behind", 0)
    kv_heads, lengths = params.get("H_kv", heads), params["lengths"]
    lengths_k = params.get("lengths_k", lengths)
    tokens, keys = sum(lengths) + tail, sum(lengths_k) + tail
    if params.get("packed"):
        qkv = rows.random_tensor((tokens, heads + 2 * kv_heads, d), dtype, device, g)
        tensors = qkv.split((heads, kv_heads, kv_heads), 1)
    else:
        sizes = ((tokens, heads, d), (keys, kv_heads, d), (keys, kv_heads, params.get("D_v", d)))
        tensors = tuple(rows.random_tensor(size, dtype, device, g) for size in sizes)
    options = {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    options["cu_seqlens_q"] = boundaries(lengths, device)
    if "lengths_k" in params:
        options["cu_seqlens_k"] = boundaries(lengths_k, device)
    if params.get("alibi"):
        options["score_mod"] = score.alibi(score.alibi_slopes(heads, device))
    if params.get("sinks"):
        options["sinks"] = rows.random_tensor((heads,), torch.float32, device, g)
    return Sample(tensors, options)


def boundaries(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """cu_seqlens (sequences + 1,) int32."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def _case(name: str, lengths: Sequence[int], **params: Any) -> Workload:
    return Workload(name, {"H": 4, "H_kv": 2, "D": 32, "lengths": tuple(lengths), **params})


RAGGED, LONGER, SHORTER = (37, 1, 64, 21), (40, 9, 64, 70), (12, 1, 63, 2)
EDGE_CASES = (
    _case("ragged: no length of a tile", RAGGED, causal=True),
    _case("full: every token of its sequence", RAGGED),
    _case("several: tiles of one sequence", (133, 70), H=2, D=64, causal=True),
    _case("empty_sequences: at both ends and between", (0, 21, 0, 0, 40, 0), causal=True),
    _case("short: most tokens are alone", (1, 1, 2, 1, 3, 1, 1, 1, 7, 1, 1, 2), causal=True),
    _case("longer_keys: each last query sees its last key", RAGGED, lengths_k=LONGER, causal=True),
    _case("more_queries: the first ones of each see nothing", RAGGED, lengths_k=SHORTER, causal=True),
    _case("without_keys: and keys without queries", (20, 0, 9, 17), lengths_k=(33, 12, 0, 40)),
    _case("behind: tokens of no sequence", RAGGED, behind=29, causal=True, return_lse=True),
    _case("no_sequence: nothing but tokens behind", (), behind=9),
    _case("window: to both sides", RAGGED, window=(9, 4)),
    _case("late_window: over other keys", RAGGED, lengths_k=LONGER, window=(9, None), causal=True),
    _case("sinks: also alone", (20, 9, 17), lengths_k=(33, 0, 40), behind=5, sinks=True, return_lse=True),
    _case("softcap: the derivative too", RAGGED, softcap=1.5, scale=0.4, causal=True),
    _case("alibi: distances in a sequence", RAGGED, alibi=True),
    _case("mqa: one key head", RAGGED, H=6, H_kv=1, causal=True),
    _case("one_head: its layout is any", (37, 20), H=1, H_kv=1, causal=True),
    _case("packed: views of one projection", RAGGED, packed=True, causal=True),
    _case("d_80: no power of two", RAGGED, D=80, causal=True),
    _case("d_v: values are narrower", RAGGED, D=96, D_v=64, causal=True),
    _case("empty: no queries", (0, 0), lengths_k=(5, 0)),
)


_LENGTHS = ((), (0,), (1,), (2, 0), (15, 16, 17), (63, 64, 65), (1, 0, 129), (127, 1, 0, 2), (128,), (17, 17, 17))
EDGE_GRID: Mapping[str, Any] = {
    "lengths": _LENGTHS,
    "lengths_k": lambda params: (
        [tuple(n + 7 for n in params["lengths"]), tuple(max(n - 1, 0) for n in params["lengths"])]
        if "lengths_k" in params
        else [None]
    ),
    "sinks": (None, None, True),
    "softcap": (None, None, 1.5),
    "alibi": lambda params: (None,) if "lengths_k" in params else (None, None, True),
}
"""Lengths of sequences beside a tile, with keys of as many, more or fewer; and every modifier with every size."""


def _bad(name: str, match: str, **change: Any) -> BadInput:
    """q (8, 4, 16), k and v (8, 2, 16), two sequences; with a change to shapes, dtypes or options."""

    def make(device: torch.device) -> Sample:
        shapes = {"q": (8, 4, 16), "k": (8, 2, 16), "v": (8, 2, 16)}
        tensors = [
            torch.ones(change.get(n, shape), device=device, dtype=change.get(f"{n}_dtype", torch.float32))
            for n, shape in shapes.items()
        ]
        options = {"cu_seqlens_q": boundaries((3, 5), device), **change.get("options", lambda cu: {})(
            boundaries((3, 5), device)
        )}  # fmt: skip
        return Sample(tuple(tensors), options)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("a batch of four dimensions", r"q is \(1, 8, 4, 16\); needs \(T, H, D\)", q=(1, 8, 4, 16)),
    _bad("integers", "k is torch.int32", k_dtype=torch.int32),
    _bad("two dtypes", "they must have one dtype", v_dtype=torch.bfloat16),
    _bad("other keys than values", "k and v must agree in T and H", v=(7, 2, 16)),
    _bad("D differs", "q and k must agree in D", k=(8, 2, 32)),
    _bad("heads in no groups", "must be a multiple", q=(8, 3, 16)),
    _bad("cu_seqlens of 64 bits", r"is \(3,\) torch.int64", options=lambda cu: {"cu_seqlens_q": cu.long()}),
    _bad("cu_seqlens in a list", "cu_seqlens_q is a list", options=lambda cu: {"cu_seqlens_q": [0, 8]}),
    _bad("cu_seqlens of two dimensions", r"needs \(sequences \+ 1,\) int32",
         options=lambda cu: {"cu_seqlens_q": cu[None]}),
    _bad("cu_seqlens of nothing", r"needs \(sequences \+ 1,\) int32", options=lambda cu: {"cu_seqlens_q": cu[:0]}),
    _bad("other keys without cu_seqlens_k", "need cu_seqlens_k", k=(9, 2, 16), v=(9, 2, 16)),
    _bad("fewer sequences of keys", "as many sequences", options=lambda cu: {"cu_seqlens_k": cu[:2]}),
    _bad("a negative window", "left = -1", options=lambda cu: {"window": (-1, 0)}),
    _bad("alibi over other keys", "one cu_seqlens", options=lambda cu: {
        "cu_seqlens_k": cu, "score_mod": score.alibi(torch.ones(4))}),
    _bad("sinks of key heads", r"sinks is \(2,\)", options=lambda cu: {"sinks": torch.ones(2, device=cu.device)}),
    _bad("softcap of zero", "positive finite number", options=lambda cu: {"softcap": 0.0}),
    _bad("infinite scale", "needs a finite number", options=lambda cu: {"scale": float("inf")}),
)  # fmt: skip
