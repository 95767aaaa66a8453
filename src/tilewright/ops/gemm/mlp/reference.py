"""`gated_mlp` in plain torch."""

import math

from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops.activation import gated, relu2
from tilewright.ops.gemm.dense.args import plain_args
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.gemm.mlp.args import GatedMlpArgs, GatedMlpBackwardArgs


def activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up."""
    if activation == "silu":
        return gated.silu_mul(gate, up)
    if activation == "relu2":
        return relu2.reference(gate, up)
    return gated.gelu_mul(gate, up, "tanh" if activation == "gelu_tanh" else "none")


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return product(plain_args(x, weight.mT, x.dtype))


def forward(args: GatedMlpArgs) -> tuple[Tensor, Tensor, Tensor]:
    """y, and gate and up unless the backward computes them again."""
    rows, x = args.x.shape[:-1], args.x.reshape(math.prod(args.x.shape[:-1]), args.x.shape[-1])
    gate, up = _linear(x, args.w_gate), _linear(x, args.w_up)
    y = _linear(activated(gate, up, args.activation), args.w_down)
    y, gate, up = (t.view(*rows, t.shape[-1]) for t in (y, gate, up))
    return (y, args.x.new_empty(0), args.x.new_empty(0)) if args.recompute else (y, gate, up)


def backward(args: GatedMlpBackwardArgs) -> tuple[Tensor, ...]:
    """The gradients, from x and the weights alone: so they have gradients themselves, whatever the forward kept."""
    inputs = args.x, args.w_gate, args.w_up, args.w_down

    def y(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return forward(GatedMlpArgs(x, w_gate, w_up, w_down, args.activation, recompute=True))[0]

    grads = vjp(y, inputs, (args.dy,))
    return tuple(g if need else g.new_empty(0) for g, need in zip(grads, args.needs, strict=True))
