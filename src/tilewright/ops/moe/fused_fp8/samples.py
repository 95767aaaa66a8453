"""Samples, costs, workloads and wrong calls of `fused_moe_fp8`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.gemm.operands import FP8
from tilewright.ops.moe import assignment
from tilewright.ops.quant.layout import BLOCK


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `fused_moe`'s samples, without an activation.  Scales are log-uniform, so that the one of a
    neighbour is wrong.
    """
    m, experts, h, i = params["M"], params["E"], params["H"], params["I"]
    ids = assignment.random_ids(params, params.get("ids", torch.int64), device, seed)
    g = rows.generator(seed + 1)
    local = -(-experts // 2) if params.get("mapped") else experts

    def scales(n: int, k: int) -> Tensor:
        shape = local, *BLOCK.shape(n, k)
        return (max(1, k) ** -0.5 * torch.exp2(2 * torch.rand(shape, generator=g) - 1)).to(device)

    x = rows.random_tensor((m, h), dtype, device, g)
    w1 = rows.random_tensor((local, 2 * i, h), FP8, device, g)
    w2 = rows.random_tensor((local, h, i), FP8, device, g)
    w1_scale, w2_scale = scales(2 * i, h), scales(h, i)
    weights = torch.rand(tuple(ids.shape), generator=g).to(params.get("weights", torch.float32)).to(device)
    kwargs: dict[str, Any] = {}
    if params.get("mapped"):
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[::2] = torch.arange(local, dtype=torch.int32)
        kwargs["expert_map"] = expert_map.to(device)
    return Sample((x, w1, w2, w1_scale, w2_scale, weights, ids), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Two products a slot; weights and scales of the experts that have tokens once, as many as random ids hit."""
    x, w1, w2, w1_scale, w2_scale, weights, ids = sample.args
    slots, (experts, h, i) = ids.numel(), w2.shape
    hit = min(slots, round(experts * (1 - (1 - 1 / experts) ** slots)))
    read = rows.nbytes(x, weights, ids) + hit * rows.nbytes(w1, w2, w1_scale, w2_scale) // experts
    return Cost(6 * slots * h * i, read, rows.nbytes(x))


def _row(name: str, m: int, e: int, k: int, h: int, i: int) -> Workload:
    return Workload(name, {"M": m, "E": e, "K": k, "H": h, "I": i}, (torch.bfloat16,), ("fwd",))


WORKLOADS = (
    _row("wide_4096", 4096, 128, 8, 7168, 2048),
    _row("wide_64", 64, 128, 8, 7168, 2048),
    _row("qwen3_30b_8192", 8192, 128, 8, 2048, 768),
    _row("small_experts_8", 8, 256, 8, 2048, 512),
    _row("small_experts_1", 1, 256, 8, 2048, 512),
)
CPU_WORKLOADS = (Workload("small", {"M": 32, "E": 8, "K": 2, "H": 256, "I": 128}, (torch.bfloat16,), ("fwd",)),)


def _case(name: str, m: int, e: int, k: int, h: int, i: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "E": e, "K": k, "H": h, "I": i, **options})


EDGE_CASES = (
    _case("odd: no row is aligned", 9, 4, 2, 133, 71),
    _case("few: most experts have no token", 5, 16, 2, 256, 144),
    _case("tiles: groups of a tile and a bit", 75, 3, 2, 272, 160),
    _case("one_token: k rows", 1, 6, 4, 128, 64),
    _case("one: an expert has all tokens", 37, 5, 1, 144, 64, chosen=1),
    _case("dropped: ids of -1", 12, 5, 3, 256, 96, dropped=True),
    _case("mapped: experts of other devices", 11, 8, 3, 256, 96, mapped=True),
    _case("twice: an expert that a token has twice", 8, 3, 4, 128, 64, again=True),
    _case("bf16_weights: as Qwen3-MoE has them", 10, 4, 2, 128, 64, weights=torch.bfloat16, ids=torch.int32),
    _case("empty: no tokens", 0, 4, 2, 128, 64),
)


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.ones(shape, dtype=dtype, device=device)

        args = {
            "x": ones(3, 8, dtype=torch.bfloat16),
            "w1": ones(4, 12, 8).to(FP8),
            "w2": ones(4, 8, 6).to(FP8),
            "w1_scale": ones(4, 1, 1),
            "w2_scale": ones(4, 1, 1),
            "topk_weights": ones(3, 2),
            "topk_ids": ones(3, 2, dtype=torch.int64),
        }
        args |= {key: change(args[key]) for key, change in changes.items()}
        return Sample(tuple(args.values()), {})

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("a batch", r"x is \(1, 3, 8\); needs \(T, H\)", x=lambda t: t[None]),
    _bad("float32 rows", "x is torch.float32", x=lambda t: t.float()),
    _bad("weights not cast", "w2 is torch.bfloat16; needs torch.float8_e4m3fn", w2=lambda t: t.bfloat16()),
    _bad("another width", r"needs \(T, H\), \(E, 2 I, H\)", w1=lambda t: t[..., :7]),
    _bad("another number of experts", "E at least 1", w2=lambda t: t[:3]),
    _bad("scales of rows", r"w1_scale is \(4, 12, 1\); needs \(4, 1, 1\)", w1_scale=lambda t: t.repeat(1, 12, 1)),
    _bad("scales in bf16", "w2_scale is torch.bfloat16", w2_scale=lambda t: t.bfloat16()),
    _bad("ids of floats", "topk_ids is .* torch.float32", topk_ids=lambda t: t.float()),
    _bad("a weight too few", r"topk_weights is \(3, 1\)", topk_weights=lambda t: t[:, :1]),
)
