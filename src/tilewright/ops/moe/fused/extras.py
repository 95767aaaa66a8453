"""What a call of `fused_moe` is made of beside its experts: shared experts, and which op has the experts' form."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.arguments import as_bool, as_float
from tilewright.errors import InputError
from tilewright.ops.activation.gelu_and_mul import gelu_and_mul
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.ops.gemm.matmul import matmul
from tilewright.ops.moe.fused.checks import ACTIVATIONS
from tilewright.ops.moe.fused.reference import gated


class SharedExperts(NamedTuple):
    """An MLP that every token takes: w1 (2 I, H), gates first, w2 (H, I); gate (1, H), by whose sigmoid(x gate^T) its
    output is weighted, as in Qwen2-MoE.
    """

    w1: Tensor
    w2: Tensor
    gate: Tensor | None = None


def has_bias_form(
    activation: str, interleaved: bool, alpha: float, limit: float, w1_bias: Tensor | None, w2_bias: Tensor | None
) -> bool:
    """Whether such experts are those of `fused_moe_bias`.  Raises InputError for what is no flag or number."""
    as_float("fused_moe", "alpha", alpha)
    as_float("fused_moe", "limit", limit)
    is_interleaved = as_bool("fused_moe", "interleaved", interleaved)
    return activation == "swigluoai" or is_interleaved or w1_bias is not None or w2_bias is not None


def check_shared(x: Tensor, shared: object, activation: str) -> None:
    """Raise InputError unless these are weights of shared experts of x (T, H)."""
    op = "fused_moe"
    if not isinstance(shared, tuple) or len(shared) not in (2, 3):
        raise InputError(f"{op}: shared_experts is a {type(shared).__name__}; needs (w1, w2) or (w1, w2, gate).")
    w1, w2, gate = SharedExperts(*shared)
    for name, t in (("w1", w1), ("w2", w2), ("gate", gate)):
        if t is None and name == "gate":
            continue
        if not isinstance(t, Tensor) or t.dim() != 2 or t.dtype != x.dtype or t.device != x.device:
            got = f"{tuple(t.shape)} {t.dtype} on {t.device}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise InputError(f"{op}: {name} of shared_experts is {got}; needs two dimensions, {x.dtype} on {x.device}.")
    width, inner = w2.shape
    if width != x.shape[-1] or tuple(w1.shape) != (2 * inner, width):
        raise InputError(
            f"{op}: shared_experts are {tuple(w1.shape)} and {tuple(w2.shape)}, x {tuple(x.shape)}; "
            "needs (2 I, H) and (H, I)."
        )
    if gate is not None and tuple(gate.shape) != (1, width):
        raise InputError(f"{op}: gate of shared_experts is {tuple(gate.shape)}; needs (1, {width}).")
    if activation not in ACTIVATIONS:
        raise InputError(f"{op}: shared_experts go with activation 'silu' or 'gelu', got {activation!r}.")


def with_shared(routed: Tensor, x: Tensor, shared: SharedExperts, activation: str, out: Tensor | None) -> Tensor:
    """routed + the output of the shared experts, each rounded to x's dtype before, as the models do.

    Their products and gate are ops of their own, each chosen for its sizes.
    """
    w1, w2, gate = SharedExperts(*shared)
    both = matmul(x, w1, trans_b=True)
    hidden = silu_and_mul(both) if activation == "silu" else gelu_and_mul(both, approximate="tanh")
    y = matmul(hidden, w2, trans_b=True)
    if gate is not None:
        y = torch.sigmoid(torch.nn.functional.linear(x, gate)) * y
    return torch.add(routed, y, out=out)


def shared_reference(x: Tensor, shared: SharedExperts, activation: str) -> Tensor:
    """The output of the shared experts in plain torch."""
    w1, w2, gate = shared
    gate_rows, up_rows = w1.chunk(2)
    y = gated(x @ gate_rows.T, x @ up_rows.T, activation) @ w2.T
    return y if gate is None else torch.sigmoid(x @ gate.T) * y
