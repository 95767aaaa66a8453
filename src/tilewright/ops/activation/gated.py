"""What the gated activations share: the activations themselves, checks, bucket, random inputs, cost and workloads.

`packed` ops take x (..., 2N), the gate in the first half of the last dimension; `split` ops take gate and up (..., N).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.dispatch.arguments import as_float
from tilewright.errors import InputError
from tilewright.ops import rows

APPROXIMATIONS = ("tanh", "none")


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(gate, up), the first and second half of the last dimension, as views."""
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


def packed_shape(x: Tensor) -> tuple[int, ...]:
    """Shape of the result of x (..., 2N): (..., N)."""
    return *x.shape[:-1], x.shape[-1] // 2


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate), rounded to gate's dtype, times up."""
    return F.silu(gate) * up


def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """gelu(gate), rounded to gate's dtype, times up."""
    return F.gelu(gate, approximate=approximate) * up


def swigluoai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped gates and ups, every step rounded as in gpt-oss."""
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


# Checks.


def check_packed(op: str, x: Tensor) -> None:
    """x is floating and its last dimension holds two halves."""
    rows.check_floating(op, x=x)
    if x.shape[-1] % 2:
        raise InputError(f"{op}: x is {tuple(x.shape)}; needs an even last dimension, gate and up side by side.")


def check_split(op: str, gate: Tensor, up: Tensor) -> None:
    """gate and up are floating and of one shape and dtype."""
    rows.check_floating(op, gate=gate, up=up)
    rows.check_same(op, gate=gate, up=up)


def check_approximate(op: str, approximate: str) -> None:
    """approximate is one of torch's two forms of GELU."""
    if approximate not in APPROXIMATIONS:
        raise InputError(f"{op}: approximate is {approximate!r}; allowed are 'tanh' and 'none'.")


def as_limit(op: str, limit: float | None) -> float:
    """The limit of the raw op of `swiglu`: 0 for none."""
    if limit is None:
        return 0.0
    number: float = as_float(op, "limit", limit)
    check_limit(op, number)
    return 0.0 if number == math.inf else number


def check_limit(op: str, limit: float) -> None:
    """limit leaves room for a gate."""
    if not limit > 0:
        raise InputError(f"{op}: limit is {limit}; needs a number above 0, or inf for no clamp of gate and up.")


def packed_bucket(x: Tensor) -> rows.RowsBucket:
    """The bucket of x (..., 2N): rows, and the width of the result."""
    bucket = rows.rows_bucket(x)
    return bucket._replace(N=bucket.N // 2)


# Random inputs and cost.


def _options(params: Mapping[str, Any]) -> dict[str, Any]:
    return {k: params[k] for k in ("approximate", "alpha", "limit", "interleaved", "gate_multiplier") if k in params}


def packed_inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional scale, and the options of the op.  x is (M, 2N)."""
    shape = (params["M"], 2 * params["N"])
    x = rows.random_tensor(shape, dtype, device, rows.generator(seed), scale=params.get("scale", 1.0))
    return Sample((x,), _options(params))


def split_inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: as in `packed_inputs`, and halves=True for gate and up as views of one packed tensor."""
    (x,) = packed_inputs(params, dtype, device, seed).args
    gate, up = halves(x)
    if not params.get("halves", False):
        gate, up = gate.contiguous(), up.contiguous()
    return Sample((gate, up), _options(params))


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads gate and up, writes one tensor of their size.  Backward reads one more and writes both gradients.

    About 10 operations an element forward and 20 backward; the bytes decide.
    """
    both = rows.nbytes(*sample.args)
    n = sum(t.numel() for t in sample.args) // 2
    return Cost(10 * n, both, both // 2) if direction == "fwd" else Cost(20 * n, both + both // 2, both)


# Workloads.


def _decode(n: int) -> tuple[Workload, ...]:
    return tuple(Workload(f"decode_{m}", {"M": m, "N": n}, directions=("fwd",)) for m in (1, 8, 64))


SILU_WORKLOADS = (
    Workload("llama8b_train", {"M": 8192, "N": 14336}),
    Workload("llama70b_train", {"M": 8192, "N": 28672}),
    Workload("qwen7b_train", {"M": 8192, "N": 18944}),
    *_decode(14336),
)
GELU_WORKLOADS = (
    Workload("gemma2_9b_train", {"M": 8192, "N": 14336}),
    Workload("gemma7b_train", {"M": 8192, "N": 24576}),
    *_decode(14336),
)
CPU_WORKLOADS = (Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),)

EDGE_CASES = (
    Workload("one_row: fewer elements than one block", {"M": 1, "N": 96}),
    Workload("odd_n: rows that start unaligned, a masked tail", {"M": 7, "N": 333}),
    Workload("n_1: one element a row", {"M": 5, "N": 1}),
    Workload("blocks: several blocks a row, the last one partly masked", {"M": 3, "N": 5000}),
    Workload("saturated: exp overflows on one side and vanishes on the other", {"M": 64, "N": 256, "scale": 100.0}),
    Workload("tiny_values: act(x) is x / 2 there", {"M": 4, "N": 256, "scale": 1e-2}),
    Workload("empty: no rows", {"M": 0, "N": 64}),
)
SPLIT_EDGE_CASES = (
    *EDGE_CASES,
    Workload("halves: gate and up are views of one packed tensor", {"M": 9, "N": 640, "halves": True}),
)
GELU_EDGE_CASES = (
    Workload("exact: GELU by erf", {"M": 17, "N": 512, "approximate": "none"}),
    Workload("exact_saturated: erf reaches 1", {"M": 64, "N": 256, "scale": 100.0, "approximate": "none"}),
)


def _ones(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


PACKED_BAD_INPUTS = (
    BadInput("odd width", lambda d: Sample((_ones((4, 7), d),)), r"x is \(4, 7\); needs an even last dimension"),
    BadInput("integers", lambda d: Sample((_ones((4, 8), d, torch.int32),)), "x is torch.int32"),
    BadInput("scalar", lambda d: Sample((_ones((), d),)), "no dimensions"),
)
SPLIT_BAD_INPUTS = (
    BadInput(
        "up too narrow", lambda d: Sample((_ones((4, 8), d), _ones((4, 7), d))), "up is .* they must have one shape"
    ),
    BadInput(
        "two dtypes", lambda d: Sample((_ones((4, 8), d), _ones((4, 8), d, torch.bfloat16))), "one shape and dtype"
    ),
    BadInput(
        "integers",
        lambda d: Sample((_ones((4, 8), d, torch.int32), _ones((4, 8), d, torch.int32))),
        "gate is torch.int32",
    ),
)


def bad_approximate(*shapes: tuple[int, ...]) -> BadInput:
    """A call on tensors of these shapes with an approximation that does not exist."""
    return BadInput(
        "unknown approximation",
        lambda d: Sample(tuple(_ones(shape, d) for shape in shapes), {"approximate": "fast"}),
        "approximate is 'fast'; allowed are 'tanh' and 'none'",
    )


def no_room(*shapes: tuple[int, ...]) -> BadInput:
    """A call on tensors of these shapes with a limit of 0."""
    return BadInput(
        "limit of 0",
        lambda d: Sample(tuple(_ones(shape, d) for shape in shapes), {"limit": 0.0}),
        "limit is 0.0; needs a number above 0",
    )
