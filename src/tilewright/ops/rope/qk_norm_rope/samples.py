"""Random arguments of `qk_norm_rope`, laid out as in models, and calls that must fail."""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.dispatch import BadInput, Sample
from tilewright.ops import rows
from tilewright.ops.rope.apply_rope.samples import inputs as rotation


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `apply_rope`, optional weight_dtype, offset, fp32_weight, eps."""
    q, k, cos, sin = (sample := rotation(params, dtype, device, seed)).args
    rng, weight_dtype = rows.generator(seed + 1), params.get("weight_dtype", dtype)
    weights = [rows.random_tensor((params["D"],), weight_dtype, device, rng) for _ in range(2)]
    options = {name: params[name] for name in ("offset", "fp32_weight", "eps") if name in params}
    return Sample((q, k, *weights, cos, sin), {**sample.kwargs, **options})


def _bad(device: torch.device, **changes: Any) -> Sample:
    """A valid call, q (2, 4, 3, 8), k (2, 2, 3, 8), tables (1, 3, 8), with some arguments changed."""
    shapes = {"q": (2, 4, 3, 8), "k": (2, 2, 3, 8), "q_weight": (8,), "k_weight": (8,), "cos": (1, 3, 8)}
    shapes["sin"] = shapes["cos"]
    tensors = {name: torch.ones(changes.pop(name, shape), device=device) for name, shape in shapes.items()}
    for name in ("k", "k_weight"):
        tensors[name] = tensors[name].to(changes.pop(f"{name}_dtype", torch.float32))
    return Sample(tuple(tensors.values()), changes)


BAD_INPUTS = (
    BadInput("weight too short", lambda d: _bad(d, q_weight=(7,)), r"q_weight is \(7,\); needs \(8,\)"),
    BadInput("weight of all heads", lambda d: _bad(d, k_weight=(2, 8)), "must have one shape and dtype"),
    BadInput("weights of two dtypes", lambda d: _bad(d, k_weight_dtype=torch.float16), "must have one shape and dtype"),
    BadInput("weights are integers", lambda d: _bad(d, k_weight_dtype=torch.int32), "k_weight is torch.int32"),
    BadInput("k of other dtype", lambda d: _bad(d, k_dtype=torch.float16), "qk_norm_rope: .* needs one dtype"),
    BadInput("rows missing", lambda d: _bad(d, cos=(1, 2, 8), sin=(1, 2, 8)), r"needs \(2, 3\) or \(1, 3\)"),
    BadInput("rotary_dim of neither width", lambda d: _bad(d, rotary_dim=4), "rotary_dim is 4"),
)
