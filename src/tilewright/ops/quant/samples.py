"""Inputs, bad inputs, costs and shapes of the casts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.quant.layout import ScaleLayout


def matrix(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """(M, N) or (B, M, N), by `params`.  Adjacent rows, and blocks of 128 columns, differ up to 64 times in magnitude:
    an element with the wrong block's scale cannot pass.  special: the first rows hold NaN, Inf, -Inf and zeros.
    """
    rng = rows.generator(seed)
    m, n = params["M"], params["N"]
    batch = (params["B"],) if "B" in params else ()
    x = rows.random_tensor((*batch, m, n), torch.float32, device, rng, scale=params.get("scale", 1.0))
    uniforms = [torch.rand((*batch, m, 1), generator=rng), torch.rand((*batch, 1, -(-n // 128)), generator=rng)]
    row_scale, column_scale = (torch.exp2(6 * uniform - 3).to(device) for uniform in uniforms)
    x *= row_scale * column_scale.repeat_interleave(128, -1)[..., :n]
    if params.get("special") and m > 3 and n:
        x[..., 0, n // 2], x[..., 1, n - 1], x[..., 2, 0] = torch.nan, torch.inf, -torch.inf
        x[..., 3, :] = 0.0
    return x.to(dtype)


def cast_cost(sample: Sample, layout: ScaleLayout) -> Cost:
    """Reads x once, writes q and the scales; an absolute value, a maximum and a product an element."""
    x = sample.args[0]
    *batch, m, n = x.shape
    return Cost(3 * x.numel(), rows.nbytes(x), x.numel() + rows.nbytes(layout.empty(m, n, "meta", *batch)))


ACTIVATIONS = tuple((m, n) for m in (1, 64, 4096, 8192) for n in (4096, 7168, 14336, 16384))
WEIGHTS = ((4096, 7168), (7168, 16384))
EXPERTS = (8, 4096, 7168)


def workloads(prefix: str = "", **options: Any) -> tuple[Workload, ...]:
    """Weights of DeepSeek-V3's and Llama's shapes, and experts in a batch; `options` go into the params."""
    b, m, n = EXPERTS
    return (
        *(Workload(f"{prefix}weight_{m}x{n}", {"M": m, "N": n, **options}, directions=("fwd",)) for m, n in WEIGHTS),
        Workload(f"{prefix}experts_{b}x{m}x{n}", {"B": b, "M": m, "N": n, **options}, directions=("fwd",)),
    )


def activations(prefix: str = "", **options: Any) -> tuple[Workload, ...]:
    """Workloads of one token to a prefill of 8192, with hidden sizes of models."""
    return tuple(Workload(f"{prefix}{m}x{n}", {"M": m, "N": n, **options}, directions=("fwd",)) for m, n in ACTIVATIONS)


def small(**options: Any) -> tuple[Workload, ...]:
    """The workload that is measured on a CPU."""
    return (Workload("small", {"M": 512, "N": 4096, **options}, (torch.bfloat16, torch.float32), ("fwd",)),)


def bad(name: str, match: str, *shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> BadInput:
    """A call with a tensor of ones that must fail."""
    return BadInput(name, lambda d: Sample((torch.ones(shape, device=d).to(dtype),), options), match)
