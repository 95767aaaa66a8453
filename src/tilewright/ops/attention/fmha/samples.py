"""Random problems of `fmha`, its edge cases, and calls that must fail."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tilewright import mask as masks
from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.attention import score
from tilewright.ops.attention.fmha.variants import VARIANTS

_OPTIONS = ("scale", "softcap", "return_lse")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: B, H, S (or S_q and S_k), D, optional H_kv, D_v; causal, window (keys a causal window has), documents
    (how many packed end to end, each causal), ids (the same by the id of every key, the first in two pieces), rows (by
    id, others in each row of the batch), mask (a name of `MASKS`), variant (of `VARIANTS`); alibi, sinks, scale,
    softcap, return_lse; layout: by head in memory by default, "token" (a view of a projection), "packed" (views of one
    of q, k and v), "BSHD".
    """
    g = rows.generator(seed)
    batch, heads, d = params["B"], params["H"], params["D"]
    kv_heads, d_v = params.get("H_kv", heads), params.get("D_v", d)
    s_q, s_k = (params["S"],) * 2 if "S" in params else (params["S_q"], params["S_k"])
    sizes = ((heads, s_q, d), (kv_heads, s_k, d), (kv_heads, s_k, d_v))
    layout = params.get("layout")
    if layout == "packed":
        qkv = rows.random_tensor((batch, s_q, heads + 2 * kv_heads, d), dtype, device, g)
        tensors = list(qkv.transpose(1, 2).split((heads, kv_heads, kv_heads), 1))
    elif layout is None:
        tensors = [rows.random_tensor((batch, *size), dtype, device, g) for size in sizes]
    else:
        tensors = [rows.random_tensor((batch, s, h, width), dtype, device, g) for h, s, width in sizes]
        if layout == "token":
            tensors = [t.transpose(1, 2) for t in tensors]
    options = {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    if layout == "BSHD":
        options["layout"] = layout
    if params.get("causal"):
        options["causal"] = True
    with unset_fake_temporarily():  # a mask is made of its numbers
        mask = _mask(params, batch, s_k)
        if mask is not None:
            options["mask"] = mask
    if params.get("alibi"):
        options["score_mod"] = score.alibi(score.alibi_slopes(heads, device))
    if params.get("sinks"):
        options["sinks"] = rows.random_tensor((heads,), torch.float32, device, g)
    return Sample(tuple(tensors), options)


def documents(count: int, length: int) -> Tensor:
    """(length,) int32: `count` documents of random lengths, always the same ones, end to end."""
    ends = torch.rand(length, generator=rows.generator(count)).argsort()[: max(count - 1, 0)]
    starts = torch.zeros(length, dtype=torch.int32)
    starts[ends] = 1
    return starts.cumsum(0).int()


def _packed(count: int, length: int) -> masks.Mask:
    """`documents` by where each begins."""
    starts = documents(count, length).diff().nonzero().flatten() + 1
    ends = torch.tensor([0]), starts, torch.tensor([length])
    return masks.document(cu_seqlens=torch.cat(ends).int(), length=length)


def _in_pieces(count: int, length: int) -> Tensor:
    """`documents`, but the last key is of the first one, so that what a query sees is no interval."""
    ids = documents(count, length)
    ids[-1] = 0
    return ids


MASKS: Mapping[str, Callable[[int], masks.Mask]] = {
    "prefix": lambda s: masks.causal() | masks.prefix(s // 3),
    "global": lambda s: masks.window(s // 4, s // 4) | masks.global_tokens(2),
    "dilated": lambda s: masks.causal() & masks.dilated(3),
    "strided": lambda s: masks.causal() & (masks.window(4) | masks.strided(5)),
    "block": lambda s: masks.block(torch.eye(-(-s // 16), dtype=torch.bool), 16),
    "heads": lambda s: masks.block(torch.arange(4 * (-(-s // 16)) ** 2).view(1, 4, *(-(-s // 16),) * 2) % 3 > 0, 16),
    "outside": lambda s: ~masks.window(s // 4, s // 4),
}
"""Masks that no band is, by name, for keys of any number."""


def _mask(params: Mapping[str, Any], batch: int, s_k: int) -> masks.Mask | None:
    if "window" in params:
        return masks.window(params["window"] - 1)
    if "sides" in params:
        return masks.window(*params["sides"])
    if "documents" in params:
        return _packed(params["documents"], s_k) & masks.causal()
    if "ids" in params:
        return masks.document(_in_pieces(params["ids"], s_k)) & masks.causal()
    if "rows" in params and batch:
        ids = torch.stack([documents(params["rows"] + row, s_k) for row in range(batch)])
        return masks.document(ids, contiguous=True) & masks.causal()
    if "variant" in params:
        return VARIANTS[params["variant"]](s_k)
    return MASKS[params["mask"]](s_k) if "mask" in params else None


_SMALL = {"B": 2, "H": 4, "H_kv": 2, "S": 37, "D": 32}


def _case(name: str, **params: Any) -> Workload:
    return Workload(name, {**_SMALL, **params})


def _unequal(name: str, s_q: int, s_k: int, **params: Any) -> Workload:
    """Other numbers of queries and keys."""
    sizes = {name: n for name, n in _SMALL.items() if name != "S"}
    return Workload(name, {**sizes, "S_q": s_q, "S_k": s_k, **params})


EDGE_CASES = (
    _case("full: tiles and a bit", B=1, H=2, S=133, D=64),
    _case("causal: the diagonal and beside it", B=1, H=2, S=133, D=64, causal=True),
    _case("batch: grouped heads, by token in memory", B=4, H=6, H_kv=3, causal=True, layout="token"),
    _case("mqa: one key head", H=6, H_kv=1, causal=True),
    _case("packed: views of one projection", causal=True, layout="packed"),
    _case("bshd: the caller's order is by token", causal=True, layout="BSHD"),
    _case("one: a single token", S=1, causal=True),
    _unequal("decode: one query, the last position", 1, 70, causal=True),
    _unequal("longer_keys: the last query sees the last key", 19, 83, causal=True),
    _unequal("more_queries: the first ones see nothing", 83, 19, causal=True),
    _case("window: a causal one", H=2, S=133, window=40),
    _case("sides: a window to both", H=2, S=133, sides=(25, 9)),
    _unequal("late_window: over more keys than queries", 40, 133, window=21),
    _case("documents: end to end", H=2, S=133, documents=5),
    _case("ids: documents by number, one in two pieces", H=2, S=133, ids=5),
    _case("rows: other documents in each row of the batch", H=2, S=133, rows=3),
    _unequal("late_rows: the same of the last queries", 40, 133, rows=3),
    *(_case(f"{name}: a mask of tiles", S=83, mask=name) for name in MASKS),
    _case("softcap: the derivative too", softcap=1.5, causal=True),
    _case("alibi: distances to both sides", alibi=True),
    _case("sinks: in the denominator", sinks=True, causal=True, return_lse=True),
    _unequal("sinks_alone: rows of nothing but a sink", 37, 11, sinks=True, causal=True),
    _case("everything: all modifiers", softcap=2.0, alibi=True, sinks=True, ids=3, scale=0.3, return_lse=True),
    _case("lse: its gradient arrives", return_lse=True),
    _case("scale: sharp scores", scale=1.0),
    _case("d_80: no power of two", D=80, causal=True),
    _case("d_v: values are narrower", D=96, D_v=64, causal=True),
    _case("d_256: wide heads", B=1, D=256, causal=True),
    _case("empty: no sequences", B=0),
)

_MASKS = ("mask", "documents", "ids", "sides")
EDGE_GRID: Mapping[str, Any] = {
    "H": lambda params: (4,) if params.get("mask") == "heads" else (1, 2, 3, 4, 6, 8),
    "window": lambda params: (None,) if any(name in params for name in _MASKS) else (None, None, 1, 2, 17, 64, 65),
    "sinks": (None, None, True),
    "softcap": (None, None, 1.5),
    "alibi": (None, None, True),
}
"""Heads that a mask of heads has; and every modifier with every size."""


def _bad(name: str, match: str, **change: Any) -> BadInput:
    """q, k, v of (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), with a change to shapes, dtypes or options."""

    def make(device: torch.device) -> Sample:
        shapes = {"q": (2, 4, 8, 16), "k": (2, 2, 8, 16), "v": (2, 2, 8, 16)}
        tensors = [
            torch.ones(change.get(n, shape), device=device, dtype=change.get(f"{n}_dtype", torch.float32))
            for n, shape in shapes.items()
        ]
        options = change.get("options", lambda device: {})
        return Sample(tuple(tensors), options(device))

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("three dimensions", r"q is \(4, 8, 16\); needs \(B, H, S, D\)", q=(4, 8, 16)),
    _bad("integers", "k is torch.int32", k_dtype=torch.int32),
    _bad("two dtypes", "they must have one dtype", v_dtype=torch.bfloat16),
    _bad("batches differ", "they must agree in B", k=(3, 2, 8, 16)),
    _bad("other keys than values", "k and v must agree in H and S", v=(2, 2, 7, 16)),
    _bad("D differs", "q and k must agree in D", k=(2, 2, 8, 32)),
    _bad("heads in no groups", "must be a multiple", q=(2, 3, 8, 16)),
    _bad("unknown layout", "layout is 'SBHD'", options=lambda d: {"layout": "SBHD"}),
    _bad("mask of torch", "mask is a Tensor; needs one of", options=lambda d: {"mask": torch.ones(8, 8)}),
    _bad("ids of another length", "document",
         options=lambda d: {"mask": masks.document(torch.zeros(5, dtype=torch.int32))}),
    _bad("sinks of key heads", r"sinks is \(2,\)", options=lambda d: {"sinks": torch.ones(2, device=d)}),
    _bad("sinks twice", "one denominator",
         options=lambda d: {"sinks": torch.ones(4), "score_mod": score.sinks(torch.ones(4))}),
    _bad("softcap of zero", "positive finite number", options=lambda d: {"softcap": 0.0}),
    _bad("infinite scale", "needs a finite number", options=lambda d: {"scale": float("inf")}),
    _bad("a modifier that is a number", "a score_mod is a float", options=lambda d: {"score_mod": 1.0}),
    _bad("dropout of one", "from 0 to below 1", options=lambda d: {"dropout": 1.0}),
    _bad("dropout with sinks", "dropout goes with masks alone",
         options=lambda d: {"dropout": 0.5, "sinks": torch.ones(4, device=d)}),
    _bad("dropout with lse", "dropout goes with masks alone", options=lambda d: {"dropout": 0.5, "return_lse": True}),
)  # fmt: skip
