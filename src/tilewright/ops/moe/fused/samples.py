"""Samples, costs, workloads and wrong calls of `fused_moe`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.moe import assignment


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M tokens, E experts, K experts a token, H, I, and those of `assignment.random_ids`; optional activation,
    weights (the dtype of topk_weights, by default float32), mapped (experts of which every second is elsewhere).
    """
    m, experts, h, i = params["M"], params["E"], params["H"], params["I"]
    ids = assignment.random_ids(params, params.get("ids", torch.int64), device, seed)
    g = rows.generator(seed + 1)
    local = -(-experts // 2) if params.get("mapped") else experts
    x = rows.random_tensor((m, h), dtype, device, g)
    w1 = rows.random_tensor((local, 2 * i, h), dtype, device, g, scale=max(1, h) ** -0.5)
    w2 = rows.random_tensor((local, h, i), dtype, device, g, scale=max(1, i) ** -0.5)
    weights = torch.rand(tuple(ids.shape), generator=g).to(params.get("weights", torch.float32)).to(device)
    kwargs: dict[str, Any] = {"activation": params["activation"]} if "activation" in params else {}
    if params.get("mapped"):
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[::2] = torch.arange(local, dtype=torch.int32)
        kwargs["expert_map"] = expert_map.to(device)
    return Sample((x, w1, w2, weights, ids), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Two products a slot; weights of the experts that have tokens once, as many as random ids hit on average.
    Backwards two products for each, none of them again, and all gradients written.
    """
    x, w1, w2, weights, ids = sample.args
    slots, (experts, h, i) = ids.numel(), w2.shape
    hit = min(slots, round(experts * (1 - (1 - 1 / experts) ** slots)))
    read = rows.nbytes(x, weights, ids) + hit * 3 * h * i * w1.element_size()
    if direction == "bwd":
        return Cost(12 * slots * h * i, read + rows.nbytes(x), rows.nbytes(x, w1, w2, weights))
    return Cost(6 * slots * h * i, read, rows.nbytes(x))


def _row(name: str, m: int, e: int, k: int, h: int, i: int) -> Workload:
    return Workload(name, {"M": m, "E": e, "K": k, "H": h, "I": i}, (torch.bfloat16,), ("fwd",))


WORKLOADS = (
    _row("wide_4096", 4096, 128, 8, 7168, 2048),
    _row("wide_512", 512, 128, 8, 7168, 2048),
    _row("wide_64", 64, 128, 8, 7168, 2048),
    Workload("qwen3_30b_8192", {"M": 8192, "E": 128, "K": 8, "H": 2048, "I": 768}, (torch.bfloat16,)),
    _row("qwen3_30b_64", 64, 128, 8, 2048, 768),
    _row("qwen3_30b_1", 1, 128, 8, 2048, 768),
    _row("mixtral_4096", 4096, 8, 2, 4096, 14336),
)
CPU_WORKLOADS = (
    Workload("small", {"M": 32, "E": 8, "K": 2, "H": 64, "I": 48}, (torch.bfloat16, torch.float32), ("fwd",)),
)


def _case(name: str, m: int, e: int, k: int, h: int, i: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "E": e, "K": k, "H": h, "I": i, **options})


EDGE_CASES = (
    _case("odd: no row is aligned", 9, 4, 2, 33, 21),
    _case("tiles: groups of a tile and a bit", 75, 3, 2, 72, 48),
    _case("one_token: k rows", 1, 6, 4, 64, 32),
    _case("one: an expert has all tokens", 37, 5, 1, 40, 64, chosen=1),
    _case("few: most experts have no token", 5, 16, 2, 64, 40),
    _case("dropped: ids of -1", 12, 5, 3, 64, 24, dropped=True),
    _case("mapped: experts of other devices", 11, 8, 3, 64, 24, mapped=True),
    _case("twice: an expert that a token has twice", 8, 3, 4, 64, 32, again=True),
    _case("gelu: another gate", 10, 4, 2, 64, 32, activation="gelu"),
    _case("bf16_weights: as Qwen3-MoE has them", 10, 4, 2, 64, 32, weights=torch.bfloat16, ids=torch.int32),
    _case("empty: no tokens", 0, 4, 2, 64, 32),
)


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.ones(shape, dtype=dtype, device=device)

        args = {
            "x": ones(3, 8),
            "w1": ones(4, 12, 8),
            "w2": ones(4, 8, 6),
            "topk_weights": ones(3, 2),
            "topk_ids": ones(3, 2, dtype=torch.int64),
        }
        kwargs = {key: value for key, value in changes.items() if key not in args}
        args |= {key: change(args[key]) for key, change in changes.items() if key in args}
        return Sample(tuple(args.values()), kwargs)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("a batch", r"x is \(1, 3, 8\); needs \(T, H\)", x=lambda t: t[None]),
    _bad("two dtypes", "must have one dtype", w2=lambda t: t.bfloat16()),
    _bad("integers", "w1 is torch.int32", w1=lambda t: t.int()),
    _bad("another width", r"needs \(T, H\), \(E, 2 I, H\)", w1=lambda t: t[..., :7]),
    _bad("an odd number of gates and ups", r"needs \(T, H\), \(E, 2 I, H\)", w1=lambda t: t[:, :11]),
    _bad("another number of experts", "E at least 1", w2=lambda t: t[:3]),
    _bad("ids of floats", "topk_ids is .* torch.float32", topk_ids=lambda t: t.float()),
    _bad("a weight too few", r"topk_weights is \(3, 1\)", topk_weights=lambda t: t[:, :1]),
    _bad("other tokens", r"needs two of \(3, k\)", topk_weights=lambda t: t[:2], topk_ids=lambda t: t[:2]),
    _bad("no such activation", "activation is 'tanh'", activation="tanh"),
    _bad("low bits", "quant is 'int4'; allowed are None, 'fp8_block'", quant="int4"),
    _bad("float8 without scales", "without w1_scale or w2_scale", quant="fp8_block"),
)
