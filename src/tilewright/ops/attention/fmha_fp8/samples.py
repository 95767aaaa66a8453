"""Random problems of `fmha_fp8`, its edge cases, and calls that must fail."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tilewright import mask as masks
from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.attention.fmha.samples import MASKS, documents
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK
from tilewright.ops.quant.numbers import E4M3

_VALUE = 3.0  # standard deviations
_OPTIONS = ("causal", "window", "scale", "softcap", "return_lse", "out_dtype")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: B, H, S (or S_q and S_k), D, optional H_kv, D_v; blocks (which of "qkv" have a scale for each 128
    tokens); causal, documents or mask as in `fmha`, window, scale, softcap, sinks, return_lse, out_dtype; layout: by
    head in memory by default, "token" (a view of a projection), "BSHD".

    Scales are log-uniform over two octaves, so that the one of a neighbour is wrong.  Values have a mean of `_VALUE`:
    around zero, probabilities of 4 bits leave a result no sign, and errors in units of its last place are luck.
    """
    g = rows.generator(seed)
    batch, heads, d = params["B"], params["H"], params["D"]
    kv_heads, d_v = params.get("H_kv", heads), params.get("D_v", d)
    s_q, s_k = (params["S"],) * 2 if "S" in params else (params["S_q"], params["S_k"])
    layout = params.get("layout")
    tensors, scales = [], []
    for name, h, s, width in (("q", heads, s_q, d), ("k", kv_heads, s_k, d), ("v", kv_heads, s_k, d_v)):
        shape = (h, s, width) if layout is None else (s, h, width)
        drawn = rows.random_tensor((batch, *shape), torch.float32, device, g)
        values = (drawn + _VALUE if name == "v" else drawn).to(E4M3)
        tensors.append(values.transpose(1, 2) if layout == "token" else values)
        blocks = (-(-s // SCALE_BLOCK),) if name in params.get("blocks", "") else ()
        scales.append(torch.exp2(2 * torch.rand((batch, h, *blocks), generator=g) - 1).to(device))
    options = {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    if layout == "BSHD":
        options["layout"] = layout
    with unset_fake_temporarily():  # a mask is made of its numbers
        if "documents" in params:
            options["mask"] = masks.document(documents(params["documents"], s_k)) & masks.causal()
        elif "mask" in params:
            options["mask"] = MASKS[params["mask"]](s_k)
    if params.get("sinks"):
        options["sinks"] = rows.random_tensor((heads,), torch.float32, device, g)
    return Sample((*tensors, *scales), options)


_SMALL = {"B": 2, "H": 4, "H_kv": 2, "S": 37, "D": 32}


def _case(name: str, **params: Any) -> Workload:
    return Workload(name, {**_SMALL, **params})


def _unequal(name: str, s_q: int, s_k: int, **params: Any) -> Workload:
    """Other numbers of queries and keys."""
    sizes = {name: n for name, n in _SMALL.items() if name != "S"}
    return Workload(name, {**sizes, "S_q": s_q, "S_k": s_k, **params})


# None returns lse: it is as exact as the scores, which matrix units cut and torch in float32 does not; its own test has
# the bound that follows from this.
EDGE_CASES = (
    _case("full: tiles and a bit", B=1, H=2, S=133, D=64),
    _case("causal: the diagonal and beside it", B=1, H=2, S=133, D=64, causal=True),
    _case("batch: grouped heads, by token in memory", B=4, H=6, H_kv=3, causal=True, layout="token"),
    _case("transposed: several tiles of queries read one head's values", B=1, H=4, H_kv=1, S=150, D=64, causal=True),
    _case("bshd: the caller's order is by token", causal=True, layout="BSHD", blocks="qkv"),
    _case("blocks: a scale for each 128 tokens", B=1, H=2, S=300, causal=True, blocks="qkv"),
    _case("blocks_k: of keys alone", B=1, H=2, S=140, blocks="k"),
    _case("blocks_v: of values alone", B=1, H=2, S=260, blocks="v", window=(150, 0)),
    _unequal("decode: one query, the last position", 1, 70, causal=True),
    _unequal("longer_keys: the last query sees the last key", 19, 183, causal=True, blocks="qkv"),
    _unequal("few_queries: the keys are divided", 4, 520, H_kv=1, causal=True),
    _unequal("few_queries_d_72: of rows that no copy engine addresses", 2, 520, H_kv=1, D=72),
    _unequal("more_queries: the first ones see nothing", 83, 19, causal=True),
    _case("window: a causal one", H=2, S=133, window=(39, 0)),
    _case("sides: a window to both, with the causal mask", H=2, S=133, window=(25, -1), causal=True),
    _case("documents: end to end", H=2, S=133, documents=5),
    _case("heads: a mask of tiles, which differ", S=83, mask="heads"),
    _case("outside: a mask without the diagonal", S=83, mask="outside", blocks="k"),
    _case("softcap: with scales that change", softcap=1.5, causal=True, blocks="k", S=150),
    _case("sinks: in the denominator", sinks=True, causal=True),
    _unequal("sinks_alone: rows of nothing but a sink", 37, 11, sinks=True, causal=True),
    _case("float32: nothing is rounded behind the sums", out_dtype=torch.float32),
    _case("float16: the result's type", out_dtype=torch.float16, causal=True),
    _case("scale: sharp scores", scale=1.0),
    _case("negative_scale: the least is the largest", scale=-0.3),
    _case("d_80: no power of two", D=80, causal=True),
    _case("d_72: rows that no copy engine addresses", D=72, causal=True, blocks="kv"),
    _case("d_v: values are narrower", D=96, D_v=64, causal=True),
    _case("d_256: wide heads", B=1, D=256, causal=True),
    _case("empty: no sequences", B=0),
)

_SHAPES = {
    "q": (2, 4, 8, 16),
    "k": (2, 2, 8, 16),
    "v": (2, 2, 8, 16),
    "q_scale": (2, 4),
    "k_scale": (2, 2),
    "v_scale": (2, 2),
}


def _bad(name: str, match: str, options: Mapping[str, Any] | None = None, **change: Any) -> BadInput:
    """Tensors of `_SHAPES`, with a change to shapes or dtypes (`k_dtype`), and options."""

    def make(device: torch.device) -> Sample:
        return Sample(tuple(_ones(n, change, device) for n in _SHAPES), options or {})

    return BadInput(name, make, match)


def _ones(name: str, change: Mapping[str, Any], device: torch.device) -> Tensor:
    dtype = torch.float32 if name.endswith("scale") else E4M3
    return torch.ones(change.get(name, _SHAPES[name]), device=device).to(change.get(f"{name}_dtype", dtype))


BAD_INPUTS = (
    _bad("three dimensions", r"q is \(4, 8, 16\); needs \(B, H, S, D\)", q=(4, 8, 16)),
    _bad("bf16", "k is torch.bfloat16; needs float8_e4m3fn", k_dtype=torch.bfloat16),
    _bad("e5m2", "v is torch.float8_e5m2; needs float8_e4m3fn", v_dtype=torch.float8_e5m2),
    _bad("batches differ", "must agree in B", k=(3, 2, 8, 16)),
    _bad("other keys than values", "k and v in H and S", v=(2, 2, 7, 16)),
    _bad("D differs", "q and k in D", k=(2, 2, 8, 32)),
    _bad("heads in no groups", "multiple", q=(2, 3, 8, 16), q_scale=(2, 3)),
    _bad("one scale for all", r"q_scale is \(\); needs \(B, H\)", q_scale=()),
    _bad("scales of query heads", r"k_scale is \(2, 4, 1\); needs \(2, 2\)", k_scale=(2, 4)),
    _bad("scales of other blocks", r"v_scale is \(2, 2, 2\); needs \(2, 2\).*or \(2, 2, 1\)", v_scale=(2, 2, 2)),
    _bad("scales in half precision", "k_scale is torch.bfloat16; needs float32", k_scale_dtype=torch.bfloat16),
    _bad("unknown layout", "layout is 'SBHD'", {"layout": "SBHD"}),
    _bad("mask of torch", "mask is a Tensor; needs one of", {"mask": torch.ones(8, 8)}),
    _bad("window of one number", "window is 4; needs", {"window": 4}),
    _bad("softcap of zero", "positive finite number", {"softcap": 0.0}),
    _bad("infinite scale", "needs a finite number", {"scale": float("inf")}),
    _bad("float8 result", "out_dtype is torch.float8_e4m3fn", {"out_dtype": E4M3}),
)
