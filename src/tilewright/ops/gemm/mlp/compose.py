"""`gated_mlp` by the products and the gate that it is made of.

Beside arguments and results a forward holds act(gate) * up, and gate and up if they are not results.  A backward holds
the gradients of three such tensors, and act(gate) * up only while the gradient of w_down is computed.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from tilewright.ops.activation import geglu, relu2, swiglu
from tilewright.ops.gemm import matmul
from tilewright.ops.gemm.dense.args import matmul_args
from tilewright.ops.gemm.mlp.args import GatedMlpArgs, GatedMlpBackwardArgs

Run = Callable[..., None]
_APPROXIMATE = {"gelu_tanh": "tanh", "gelu_erf": "none"}


def _product(run: Run, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None) -> None:
    run(matmul.FORWARD, out, *matmul_args(a, b, None, None, c, 1.0, None))


def _activate(run: Run, out: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    if activation == "silu":
        run(swiglu.FORWARD, out, *swiglu.SwigluArgs(gate, up, 1.0, 0.0))
    elif activation == "relu2":
        run(relu2.FORWARD, out, *relu2.Relu2Args(gate, up))
    else:
        run(geglu.FORWARD, out, *geglu.GegluArgs(gate, up, _APPROXIMATE[activation]))


def _activate_backward(
    run: Run, outs: tuple[Tensor, Tensor], dout: Tensor, gate: Tensor, up: Tensor, activation: str
) -> None:
    if activation == "silu":
        run(swiglu.BACKWARD, outs, *swiglu.SwigluBackwardArgs(dout, gate, up, 1.0, 0.0))
    elif activation == "relu2":
        run(relu2.BACKWARD, outs, *relu2.Relu2BackwardArgs(dout, gate, up))
    else:
        run(geglu.BACKWARD, outs, *geglu.GegluBackwardArgs(dout, gate, up, _APPROXIMATE[activation]))


def _rows(t: Tensor) -> Tensor:
    """`t` (..., N) as (M, N); a view where possible."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _gate_and_up(run: Run, args: GatedMlpArgs, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """gate and up, (M, I) each, written into `saved` unless the backward computes them again."""
    x = _rows(args.x)
    each = []
    for weight, memory in zip((args.w_gate, args.w_up), saved, strict=True):
        out = x.new_empty((x.shape[0], weight.shape[0])) if args.recompute else _rows(memory)
        _product(run, out, x, weight.mT)
        each.append(out)
    return each[0], each[1]


def forward(run: Run, outs: Sequence[Tensor], args: GatedMlpArgs) -> None:
    """y, and gate and up unless the backward computes them again."""
    y, *saved = outs
    gate, up = _gate_and_up(run, args, saved)
    hidden = gate.new_empty(gate.shape)
    _activate(run, hidden, gate, up, args.activation)
    _product(run, _rows(y), hidden, args.w_down.mT)


def backward(run: Run, outs: Sequence[Tensor], args: GatedMlpBackwardArgs) -> None:
    """The gradients that are wanted."""
    dx, dw_gate, dw_up, dw_down = outs
    dy, x, saved = _rows(args.dy), _rows(args.x), (args.gate, args.up)
    gate, up = _gate_and_up(run, args.forward, saved) if args.recompute else (_rows(t) for t in saved)
    if args.need_dw_down:
        hidden = gate.new_empty(gate.shape)
        _activate(run, hidden, gate, up, args.activation)
        _product(run, dw_down, dy.mT, hidden)
        del hidden
    if not (args.need_dx or args.need_dw_gate or args.need_dw_up):
        return
    dhidden, dgate, dup = (gate.new_empty(gate.shape) for _ in range(3))
    _product(run, dhidden, dy, args.w_down)
    _activate_backward(run, (dgate, dup), dhidden, gate, up, args.activation)
    if args.need_dw_gate:
        _product(run, dw_gate, dgate.mT, x)
    if args.need_dw_up:
        _product(run, dw_up, dup.mT, x)
    if args.need_dx:
        rows = _rows(dx)
        _product(run, rows, dgate, args.w_gate)
        _product(run, rows, dup, args.w_up, c=rows)
