"""The epilogue as a separate step with a gradient.

A fused epilogue does not store z = alpha * A @ B + bias, which its gradient needs.  If a gradient is needed, the
product writes z in the dtype of the result, and this step follows: nothing is computed twice or stored in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch.derivatives import Function, level_is_open
from tilewright.ops.gemm.operands import apply_epilogue
from tilewright.ops.rows import accumulate_dtype

_aten = torch.ops.aten


def activated(z: Tensor, c: Tensor | None, activation: str) -> Tensor:
    """Returns act(z) + c, computed in float32 and rounded once to z's dtype; differentiable in z and c."""
    # A compiler's partitioner does the same: it saves z and recomputes the rest.  `_Activated` has no forward mode
    if torch.compiler.is_compiling() or level_is_open():
        return apply_epilogue(z.to(accumulate_dtype(z.dtype)), None, c, activation, z.dtype)
    result: Tensor = _Activated.apply(z, c, activation)
    return result


class _Activated(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, c: Tensor | None, activation: str) -> Tensor:
        return apply_epilogue(z.to(accumulate_dtype(z.dtype)), None, c, activation, z.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, _, ctx.activation = inputs
        ctx.save_for_backward(z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Computes dz = dy act'(z) by differentiable torch ops, so that create_graph gives second derivatives."""
        (z,) = ctx.saved_tensors
        acc_dtype = accumulate_dtype(z.dtype)
        dz = (
            _gradient(dy.to(acc_dtype), z.to(acc_dtype), ctx.activation).to(z.dtype)
            if ctx.needs_input_grad[0]
            else None
        )
        return dz, dy if ctx.needs_input_grad[1] else None, None


def _gradient(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return _aten.threshold_backward(dy, z, 0)
    if activation == "gelu":
        return _aten.gelu_backward(dy, z, approximate="tanh")
    if activation == "silu":
        return _silu_gradient(dy, z)
    gate, up = z[..., 0::2], z[..., 1::2]
    return torch.stack((_silu_gradient(dy * up, gate), dy * F.silu(gate)), -1).flatten(-2)


def _silu_gradient(dy: Tensor, z: Tensor) -> Tensor:
    """Returns dy silu'(z); torch's own op has no second derivative."""
    if not torch.is_grad_enabled() and not level_is_open():
        return _aten.silu_backward(dy, z)
    share = torch.sigmoid(z)
    return dy * share * (1.0 + z * (1.0 - share))
