"""Problems of `gated_mlp`."""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, H, I; optional batch, O (default H), activation, recompute."""
    m, h, inner, g = params["M"], params["H"], params["I"], rows.generator(seed + 1)
    shape = (params["batch"], m, h) if "batch" in params else (m, h)
    x = rows.random_tensor(shape, dtype, device, rows.generator(seed))
    gate, up = (rows.random_tensor((inner, h), dtype, device, g, max(1, h) ** -0.5) for _ in range(2))
    down = rows.random_tensor((params.get("O", h), inner), dtype, device, g, max(1, inner) ** -0.5)
    return Sample((x, gate, up, down), {k: params[k] for k in ("activation", "recompute") if k in params})


def cost(sample: Sample, direction: str) -> Cost:
    """Three products forward and six for their gradients; what recomputes two more has the floor of what keeps gate and
    up, as peers do.  At best these are not moved, unless the forward keeps them.
    """
    x, w_gate, w_up, w_down = sample.args
    m, inner = x.numel() // max(1, x.shape[-1]), w_gate.shape[0]
    first, last = 2 * 2 * x.numel() * inner, 2 * m * w_down.numel()
    saved = 0 if sample.kwargs.get("recompute", False) else 2 * m * inner * x.element_size()
    weights, y = rows.nbytes(w_gate, w_up, w_down), m * w_down.shape[0] * x.element_size()
    if direction == "fwd":
        return Cost(first + last, rows.nbytes(x) + weights, y + saved)
    return Cost(2 * (first + last), rows.nbytes(x) + weights + y + saved, rows.nbytes(x) + weights)


WORKLOADS = (
    Workload("llama8b_4k", {"M": 4096, "H": 4096, "I": 14336}),
    Workload("llama8b_4k_recompute", {"M": 4096, "H": 4096, "I": 14336, "recompute": True}),
    Workload("gemma2_9b_4k", {"M": 4096, "H": 3584, "I": 14336, "activation": "gelu_tanh"}),
)
CPU_WORKLOADS = (Workload("small", {"M": 64, "H": 128, "I": 256}, (torch.float32,)),)

_SMALL = {"M": 9, "H": 24, "I": 40}
EDGE_CASES = (
    Workload("one_row: a single row", {"M": 1, "H": 32, "I": 64}),
    Workload("odd: no size is a multiple of anything", {"M": 7, "H": 13, "I": 21, "O": 5}),
    Workload("batch: more dimensions, GELU by tanh", {**_SMALL, "batch": 2, "activation": "gelu_tanh"}),
    Workload("recompute: nothing but x is kept, GELU by erf", {**_SMALL, "activation": "gelu_erf", "recompute": True}),
    Workload("relu2: BitNet's gate", {**_SMALL, "activation": "relu2"}),
    Workload("empty: no rows", {"M": 0, "H": 24, "I": 40}),
)


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        shapes = {"x": (4, 6), "w_gate": (8, 6), "w_up": (8, 6), "w_down": (6, 8)}
        options = {k: v for k, v in changes.items() if k not in shapes}
        dtype = options.pop("dtype", torch.float32)
        tensors = [torch.ones(changes.get(k, shape), device=device) for k, shape in shapes.items()]
        return Sample((tensors[0].to(dtype), *tensors[1:]), options)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("x of integers", "x is torch.int64", dtype=torch.int64),
    _bad("another dtype", "w_gate is torch.float32, x is torch.bfloat16", dtype=torch.bfloat16),
    _bad("w_gate transposed", r"w_gate is \(6, 8\); needs \(I, 6\)", w_gate=(6, 8)),
    _bad("w_up of another size", r"w_up is \(7, 6\); needs \(8, 6\)", w_up=(7, 6)),
    _bad("w_down transposed", r"w_down is \(8, 6\); needs \(O, 8\)", w_down=(8, 6)),
    _bad("an unknown activation", "activation is 'gelu'; allowed are 'silu', 'gelu_tanh'", activation="gelu"),
)
