"""Samples, costs, workloads and wrong calls of `fused_moe_bias`."""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.moe.fused import samples


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `fused_moe`'s samples; bias ("both" by default, "first" or "none"), transposed (weights as
    (E, H, 2 I) and (E, I, H) in memory), interleaved, alpha, limit.
    """
    plain = samples.inputs({**params, "activation": params.get("activation", "swigluoai")}, dtype, device, seed)
    x, w1, w2, weights, ids = plain.args
    if params.get("transposed"):
        w1, w2 = (w.mT.contiguous().mT for w in (w1, w2))
    kwargs = dict(plain.kwargs)
    g = rows.generator(seed + 2)
    has = params.get("bias", "both")
    if has != "none":
        kwargs["w1_bias"] = rows.random_tensor(tuple(w1.shape[:2]), dtype, device, g)
    if has == "both":
        kwargs["w2_bias"] = rows.random_tensor(tuple(w2.shape[:2]), dtype, device, g)
    kwargs |= {name: params[name] for name in ("interleaved", "alpha", "limit") if name in params}
    return Sample((x, w1, w2, weights, ids), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Cost of `fused_moe`, and of the biases."""
    plain = samples.cost(sample, direction)
    biases = [b for b in (sample.kwargs.get("w1_bias"), sample.kwargs.get("w2_bias")) if b is not None]
    return Cost(plain.flops, plain.bytes_read + rows.nbytes(*biases), plain.bytes_written)


_OSS = {"E": 32, "K": 4, "H": 2880, "I": 2880, "interleaved": True, "transposed": True}
WORKLOADS = tuple(Workload(f"gpt_oss_20b_{m}", {"M": m, **_OSS}, (torch.bfloat16,), ("fwd",)) for m in (4096, 64, 1))
CPU_WORKLOADS = (Workload("small", {"M": 32, "E": 8, "K": 2, "H": 64, "I": 48}, (torch.bfloat16,), ("fwd",)),)


def _case(name: str, m: int, e: int, k: int, h: int, i: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "E": e, "K": k, "H": h, "I": i, **options})


EDGE_CASES = (
    _case("gpt_oss: interleaved and transposed", 9, 6, 2, 64, 48, interleaved=True, transposed=True),
    _case("few: most experts have no token", 5, 16, 2, 64, 40, interleaved=True),
    _case("tiles: groups of a tile and a bit", 75, 3, 2, 72, 48, transposed=True),
    _case("one_token: k rows", 1, 6, 4, 64, 32, bias="first"),
    _case("odd: no row is aligned", 9, 4, 2, 33, 21, interleaved=True),
    _case("odd_transposed: no column is aligned", 9, 4, 2, 33, 21, transposed=True),
    _case("clamped: gates and ups beyond the limit", 8, 4, 2, 64, 32, limit=0.5, alpha=1.0),
    _case("silu: transposed without biases, as Llama 4", 8, 4, 1, 64, 32, transposed=True, activation="silu",
          bias="none"),
    _case("gelu: gates beside ups", 8, 4, 2, 64, 32, interleaved=True, activation="gelu"),
    _case("dropped: ids of -1", 12, 5, 3, 64, 24, dropped=True),
    _case("mapped: experts of other devices", 11, 8, 3, 64, 24, mapped=True),
    _case("twice: an expert that a token has twice", 8, 3, 4, 64, 32, again=True),
    _case("bf16_weights: ids of 32 bits", 10, 4, 2, 64, 32, weights=torch.bfloat16, ids=torch.int32),
    _case("empty: no tokens", 0, 4, 2, 64, 32),
)  # fmt: skip


def _bad(name: str, match: str, *, width: int = 8, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        plain = samples.inputs({"M": 3, "E": 4, "K": 2, "H": 8, "I": 6}, torch.float32, device, 0)
        options = {name: change(device) if callable(change) else change for name, change in changes.items()}
        return Sample((plain.args[0][:, :width], *plain.args[1:]), options)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("another width", r"needs \(T, H\)", width=7),
    _bad("a bias of another size", r"w1_bias is \(4, 6\)", w1_bias=lambda d: torch.ones(4, 6, device=d)),
    _bad("a bias of another dtype", "torch.float32, a row", w2_bias=lambda d: torch.ones(4, 8, device=d).half()),
    _bad("no tensor", "w1_bias is a float", w1_bias=1.0),
    _bad("no such activation", "activation is 'tanh'", activation="tanh"),
    _bad("a limit below 0", "limit is -1", limit=-1.0),
)  # fmt: skip
