"""A linear layer on `ops.matmul`: epilogues in the forward, weight gradients summed in float32."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.dispatch import numerics, use_backend
from tilewright.dispatch.derivatives import level_is_open
from tilewright.dispatch.preference import resolve
from tilewright.errors import InputError
from tilewright.hardware.autocast import cast_as_linear
from tilewright.nn.weight_gradient import gradient_to_accumulate, is_needed
from tilewright.ops.gemm.activation import activated
from tilewright.ops.gemm.operands import ACTIVATIONS


class Linear(nn.Linear):
    """act(x @ weight.T + bias); takes the place of torch.nn.Linear, with its parameters, state_dict and autocast.

    activation: as in `ops.matmul`, in the same kernel if no gradient is needed; with "swiglu" rows of `weight` are
    pairs (gate_0, up_0, gate_1, ...) and the result has out_features / 2 columns.
    backend: run on exactly this backend or raise BackendError.
    grad_dtype=torch.float32: gradients of bf16 or fp16 parameters are float32 sums over the micro-batches of a step.
    The gradient of `weight` is never rounded: from the second micro-batch on the product in `backward()` adds to
    `weight.grad` itself (its `c` and `out` are the gradient so far).  torch.autograd.grad, backward(inputs=),
    create_graph and hooks of `weight.register_hook` work as for any parameter; if one of them needs the gradient,
    autograd adds it.
    torch.compile cannot trace a parameter whose `.grad` has another dtype, so the training of such a layer is a graph
    break, and an error with fullgraph=True.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        backend: str | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        if grad_dtype not in (None, torch.float32):
            raise InputError(f"Linear: grad_dtype is {grad_dtype}; allowed are None and torch.float32.")
        if activation is not None and activation not in ACTIVATIONS[1:]:
            allowed = ", ".join(map(repr, ACTIVATIONS[1:]))
            raise InputError(f"Linear: activation is {activation!r}; allowed are None, {allowed}.")
        if activation == "swiglu" and out_features % 2:
            raise InputError(
                f"Linear: swiglu pairs rows of weight, and out_features is {out_features}; it must be even."
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.backend, self.grad_dtype = activation, backend, grad_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        if x.dim() == 1:
            result: Tensor = self.forward(x.unsqueeze(0))
            return result.squeeze(0)
        if self.grad_dtype is not None and torch.is_grad_enabled():
            return _uncompiled(self, x)
        x, weight, bias = cast_as_linear(x, self.weight, self.bias)
        return ops.matmul(x, weight, bias=bias, activation=self.activation, trans_b=True, backend=self.backend)

    def extra_repr(self) -> str:
        """Sizes and options, for `print(model)`."""
        options = {"activation": self.activation, "backend": self.backend, "grad_dtype": self.grad_dtype}
        return super().extra_repr() + "".join(f", {k}={v}" for k, v in options.items() if v is not None)


def _trained(layer: Linear, x: Tensor) -> Tensor:
    """The forward of a layer with `grad_dtype`."""
    for parameter in layer.parameters():
        if parameter.requires_grad and parameter.grad_dtype != layer.grad_dtype:
            parameter.grad_dtype = layer.grad_dtype
    if not layer.weight.is_leaf:
        raise InputError(
            "Linear: grad_dtype needs weight to be a parameter, and here it is computed from others, to which no "
            "gradient would go on. Remove its parametrization, or leave grad_dtype away."
        )
    if layer.weight.dtype == torch.float64:
        raise InputError("Linear: weight is torch.float64, and grad_dtype is narrower. Leave grad_dtype away.")
    x, weight, bias = cast_as_linear(x, layer.weight, layer.bias)
    if not weight.requires_grad or level_is_open():  # the op has forward-mode derivatives, `_WideGradient` has none
        return ops.matmul(x, weight, bias=bias, activation=layer.activation, trans_b=True, backend=layer.backend)
    z: Tensor = _WideGradient.apply(x, weight, layer.weight, bias, layer.backend)
    return z if layer.activation is None else activated(z, None, layer.activation)


def _uncompiled(layer: Linear, x: Tensor) -> Tensor:
    """Run `_trained` outside torch.compile.  Dynamo takes a second to import, so skip it unless it is loaded."""
    dynamo = sys.modules.get("torch._dynamo")
    result: Tensor = (_trained if dynamo is None else dynamo.disable(_trained))(layer, x)
    return result


class _WideGradient(torch.autograd.Function):
    """x @ weight.T + bias with a float32 gradient of `parameter`; `weight` is it, or autocast's copy of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, parameter: nn.Parameter, bias: Tensor | None, backend: str | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.wish = parameter, resolve(backend)
        return ops.matmul(x, weight, bias=bias, trans_b=True, backend=backend)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients as ops on saved tensors, which have gradients themselves: create_graph gets second derivatives."""
        x, weight = ctx.saved_tensors
        to_x, _, to_parameter, to_bias = (*(node for node, _ in ctx.next_functions), None)[:4]
        rows = dz.flatten(0, -2)
        dx = dparameter = dbias = None
        backend, mode = ctx.wish
        with use_backend(backend.rstrip("!")), numerics(mode):  # a preference: dx and dw have other layouts
            if is_needed(to_x):
                dx = ops.matmul(dz, weight)
            if is_needed(to_parameter):
                dparameter = _weight_gradient(ctx.parameter, to_parameter, rows, x.flatten(0, -2))
        if is_needed(to_bias):
            dbias = rows.sum(0, dtype=torch.float32)
        return dx, None, dparameter, dbias, None


def _weight_gradient(parameter: nn.Parameter, node: Any, dz: Tensor, x: Tensor) -> Tensor | None:
    """dz.T @ x in float32 for autograd, or None if it was added to `parameter.grad`."""
    grad = gradient_to_accumulate(parameter, node)
    if grad is None:
        return ops.matmul(dz, x, trans_a=True, out_dtype=torch.float32)
    ops.matmul(dz, x, trans_a=True, c=grad, out=grad, out_dtype=torch.float32)
    return None
