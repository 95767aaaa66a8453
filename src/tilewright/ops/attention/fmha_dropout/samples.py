"""Random problems of `fmha_dropout`: those of `fmha` with a seed; its edge cases, and calls that must fail."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright import mask as masks
from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops.attention import score
from tilewright.ops.attention.fmha import samples as fmha


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `fmha`, p, and optional offset."""
    sample = fmha.inputs(params, dtype, device, seed)
    options = {name: params[name] for name in ("p", "offset") if name in params}
    return Sample(sample.args, {**sample.kwargs, **options, "seed": torch.tensor(seed + 17, device=device)})


_SMALL = {"B": 2, "H": 4, "H_kv": 2, "S": 37, "D": 32, "p": 0.25}


def _case(name: str, **params: Any) -> Workload:
    return Workload(name, {**_SMALL, **params})


EDGE_CASES = (
    _case("full: tiles and a bit, and 64 bits of offset", B=1, H=2, S=83, D=64, offset=2**40 + 3),
    _case("causal: grouped heads, the caller's order is by token", causal=True, layout="BSHD"),
    Workload("late_window: over more keys than queries",
             {"B": 1, "H": 2, "S_q": 19, "S_k": 83, "D": 96, "D_v": 64, "p": 0.5, "window": 21}),
    _case("documents: end to end", B=1, H=2, S=83, documents=5),
    _case("everything: all modifiers", softcap=2.0, alibi=True, sinks=True, causal=True, return_lse=True),
    _case("one: a single token", S=1, causal=True),
    _case("nothing_dropped: p is 0", p=0.0),
    _case("empty: no sequences", B=0),
)  # fmt: skip
EDGE_GRID: Mapping[str, Any] = {**fmha.EDGE_GRID, "p": (0.0, 0.1, 0.5)}


def _bad(name: str, match: str, options: Callable[[torch.device], dict[str, Any]]) -> BadInput:
    """q, k, v of (2, 4, 8, 16) with p = 0.5, a seed, and `options` instead."""

    def make(device: torch.device) -> Sample:
        q = torch.ones(2, 4, 8, 16, device=device)
        return Sample((q, q, q), {"p": 0.5, "seed": 1, **options(device)})

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("p above 1", "p is 1.5; needs a number 0 to 1", lambda d: {"p": 1.5}),
    _bad("p is NaN", "p is nan", lambda d: {"p": float("nan")}),
    _bad("seed of 65 bits", "needs an integer of 64 bits", lambda d: {"seed": 2**63}),
    _bad("a vector of seeds", r"seed is torch.int64 \(4,\)",
         lambda d: {"seed": torch.ones(4, dtype=torch.int64, device=d)}),
    _bad("sinks of key heads", r"sinks is \(2,\)", lambda d: {"sinks": torch.ones(2, device=d)}),
    _bad("ids of another length", "document", lambda d: {"mask": masks.document(torch.zeros(5, dtype=torch.int32))}),
    _bad("unknown layout", "layout is 'SBHD'", lambda d: {"layout": "SBHD"}),
    _bad("a bias", "no score modifier but softcap, alibi and sinks",
         lambda d: {"score_mod": score.relative_bias(torch.zeros(4, 9, device=d))}),
)  # fmt: skip
