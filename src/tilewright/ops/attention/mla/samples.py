"""Random problems of `mla`, its edge cases, and calls that must fail."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tilewright import mask as masks
from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.attention.fmha.samples import MASKS, documents
from tilewright.ops.attention.mla.checks import NAMES


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: B, H, S (or S_q and S_k), D, D_pe, D_v; causal=False; window, documents or mask as `fmha` takes them;
    scale, return_lse; layout: by head in memory by default, "views" (q and q_pe of one projection, k and v of another,
    as models have them), "BSHD".
    """
    g = rows.generator(seed)
    batch, heads, d, d_pe, d_v = (params[name] for name in ("B", "H", "D", "D_pe", "D_v"))
    s_q, s_k = (params["S"],) * 2 if "S" in params else (params["S_q"], params["S_k"])
    layout = params.get("layout")
    if layout == "views":
        of_q = rows.random_tensor((batch, s_q, heads, d + d_pe), dtype, device, g).transpose(1, 2)
        of_k = rows.random_tensor((batch, s_k, heads, d + d_v), dtype, device, g).transpose(1, 2)
        k_pe = rows.random_tensor((batch, s_k, 1, d_pe), dtype, device, g).transpose(1, 2)
        (q, q_pe), (k, v) = of_q.split((d, d_pe), -1), of_k.split((d, d_v), -1)
        tensors = [q, q_pe, k, k_pe, v]
    else:
        sizes: tuple[tuple[int, ...], ...] = (
            (heads, s_q, d),
            (heads, s_q, d_pe),
            (heads, s_k, d),
            (1, s_k, d_pe),
            (heads, s_k, d_v),
        )
        if layout == "BSHD":
            sizes = tuple((s, h, width) for h, s, width in sizes)
        tensors = [rows.random_tensor((batch, *size), dtype, device, g) for size in sizes]
    options = {name: params[name] for name in ("causal", "scale", "return_lse") if params.get(name) is not None}
    if layout == "BSHD":
        options["layout"] = layout
    with unset_fake_temporarily():  # a mask is made of its numbers
        if "window" in params:
            options["mask"] = masks.window(params["window"] - 1)
        elif "documents" in params:
            options["mask"] = masks.document(documents(params["documents"], s_k))
        elif "mask" in params:
            options["mask"] = MASKS[params["mask"]](s_k)
    return Sample(tuple(tensors), options)


_SMALL = {"B": 2, "H": 3, "S": 37, "D": 32, "D_pe": 16, "D_v": 32}


def _case(name: str, **params: Any) -> Workload:
    return Workload(name, {**_SMALL, **params})


def _unequal(name: str, s_q: int, s_k: int, **params: Any) -> Workload:
    """Other numbers of queries and keys."""
    sizes = {name: n for name, n in _SMALL.items() if name != "S"}
    return Workload(name, {**sizes, "S_q": s_q, "S_k": s_k, **params})


EDGE_CASES = (
    _case("deepseek: its widths, tiles and a bit", B=1, H=2, S=133, D=128, D_pe=64, D_v=128),
    _case("full: every key", S=133, causal=False),
    _case("views: of two projections", layout="views"),
    _case("bshd: the caller's order is by token", layout="BSHD"),
    _case("heads: more than are added up at a time", B=1, H=18, S=20),
    _unequal("one: a single query, the last position", 1, 70),
    _unequal("chunk: queries behind a prefix of keys", 19, 83),
    _unequal("more_queries: the first ones see nothing", 83, 19),
    _case("window: a causal one", S=133, window=40),
    _case("documents: end to end", S=133, documents=5),
    _case("heads_differ: a mask of tiles", H=4, S=83, mask="heads", causal=False),
    _case("lse: its gradient arrives", return_lse=True),
    _case("scale: sharp scores", scale=1.0),
    _case("d_80: no powers of two", D=80, D_pe=24, D_v=48),
    _case("wide: a rotated part wider than the other", D=16, D_pe=64, D_v=64),
    _case("empty: no sequences", B=0),
)

_SHAPES = {"q": (2, 4, 8, 16), "q_pe": (2, 4, 8, 8), "k": (2, 4, 8, 16), "k_pe": (2, 1, 8, 8), "v": (2, 4, 8, 16)}


def _bad(name: str, match: str, options: Mapping[str, Any] | None = None, **change: Any) -> BadInput:
    """Tensors of `_SHAPES`, with a change to shapes or dtypes (`q_pe_dtype`), and options."""

    def make(device: torch.device) -> Sample:
        tensors = [
            torch.ones(change.get(n, _SHAPES[n]), device=device, dtype=change.get(f"{n}_dtype", torch.float32))
            for n in NAMES
        ]
        return Sample(tuple(tensors), options or {})

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("three dimensions", r"k_pe is \(2, 8, 8\); needs \(B, H, S, D_pe\)", k_pe=(2, 8, 8)),
    _bad("integers", "k is torch.int32", k_dtype=torch.int32),
    _bad("two dtypes", "q_pe is torch.bfloat16", q_pe_dtype=torch.bfloat16),
    _bad("batches differ", "k_pe must be as k", k_pe=(1, 1, 8, 8)),
    _bad("groups of heads", "one number of heads", k=(2, 2, 8, 16), v=(2, 2, 8, 16)),
    _bad("a rotated key for every head", "have one head", k_pe=(2, 4, 8, 8)),
    _bad("other queries in the rotated part", "q_pe must be as q", q_pe=(2, 4, 7, 8)),
    _bad("D_pe differs", "must agree in D_pe", k_pe=(2, 1, 8, 16)),
    _bad("D differs", "q and k must agree in D", k=(2, 4, 8, 32)),
    _bad("other keys than values", "k and v must agree in H and S", v=(2, 4, 7, 16)),
    _bad("unknown layout", "layout is 'SBHD'", {"layout": "SBHD"}),
    _bad("mask of torch", "mask is a Tensor; needs one of", {"mask": torch.ones(8, 8)}),
    _bad("ids of another length", "document", {"mask": masks.document(torch.zeros(5, dtype=torch.int32))}),
    _bad("infinite scale", "needs a finite number", {"scale": float("inf")}),
)
