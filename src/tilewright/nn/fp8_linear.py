"""A linear layer whose three products, forward and both gradients, run in float8 with float32 sums of scaled blocks.

    y  = x  @ W.T   x 1x128 along K, W 128x128
    dx = dy @ W     dy 1x128 along N, W 128x128, the same values transposed
    dW = dy.T @ x   both 1x128 along tokens

This is the recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3).  A version of the weights is cast once for all calls;
activations and gradients are cast for every product.
"""

import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tilewright.dispatch import numerics, use_backend
from tilewright.dispatch.derivatives import has_tangent
from tilewright.dispatch.preference import resolve
from tilewright.errors import InputError
from tilewright.hardware.autocast import AUTOCASTS
from tilewright.nn.weight_casts import Cast, WeightCasts, capturing
from tilewright.nn.weight_gradient import forbid_second_derivative, gradient_to_accumulate, is_needed
from tilewright.ops.gemm.scaled_matmul import scaled_matmul
from tilewright.ops.quant.per_block_cast_to_fp8 import per_block_cast_to_fp8
from tilewright.ops.quant.per_channel_cast_to_fp8 import per_channel_cast_to_fp8
from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8

E4M3 = torch.float8_e4m3fn
_MASTERS = (torch.bfloat16, torch.float16, torch.float32)
_VECTOR = 16  # tokens: the copy engine needs float8 rows of a multiple of 16 bytes


class FP8Linear(nn.Linear):
    """x @ weight.T + bias in float8; takes the place of torch.nn.Linear, with its parameters, state_dict and autocast.

    weight: (out_features, in_features) bf16|fp16|fp32, the master that an optimizer updates.  It has two float8 copies
    of one byte an element, one for the forward and one for dx.  They are made when first needed and cached until an
    optimizer that holds `weight` takes a step, torch counts a write to it, or it moves to other memory (`WeightCasts`).
    Micro-batches share them.  Writes that torch does not count, as `weight.data.copy_(...)` and replays of CUDA graphs,
    need `requantise()` after them.  A CUDA graph of training casts in every replay.  A graph of evaluation reads the
    cached copies, which are cast again in the same memory by the next call after a write, and immediately by a step, by
    `load_state_dict` and by `requantise()`.
    x: bf16|fp16|fp32; the result has its dtype, or autocast's.
    Any sizes run; kernels for tensor cores need multiples of 16 for in_features and out_features.

    backend: run the products on exactly this backend or raise BackendError.
    grad_dtype=torch.float32: as in `tilewright.nn.Linear`: the product adds to the float32 `weight.grad` in place.
    There are no second derivatives and no forward-mode derivatives: taking one raises InputError.

    torch.compile traces calls that need no gradient, and casts the weight in each of them unless it is frozen.
    Training is a graph break, and an error with fullgraph=True.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._initialise(backend, grad_dtype)

    def _initialise(self, backend: str | None, grad_dtype: torch.dtype | None) -> None:
        if self.weight.dtype not in _MASTERS:
            raise InputError(f"FP8Linear: weight is {self.weight.dtype}; needs bfloat16, float16 or float32.")
        if grad_dtype not in (None, torch.float32):
            raise InputError(f"FP8Linear: grad_dtype is {grad_dtype}; allowed are None and torch.float32.")
        self.backend, self.grad_dtype = backend, grad_dtype
        self._casts = WeightCasts()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        frozen: bool = False,
        backend: str | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> Self:
        """A layer that shares the parameters of `linear`; with `frozen` it keeps only a float8 copy of the weight."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.training = linear.training
        layer._initialise(backend, grad_dtype)
        return layer.freeze() if frozen else layer

    @property
    def frozen(self) -> bool:
        """True if the weight is float8, without a master."""
        return self.weight.dtype == E4M3

    def freeze(self) -> Self:
        """Keep the weight in float8 alone, a quarter to half of the memory: for inference, or below adapters.

        `weight` becomes e4m3 without a gradient and `weight_scale_inv` its float32 scales, (ceil(N / 128), ceil(K /
        128)), with the names and meaning of DeepSeek's checkpoints.  Loading a state_dict with a wider `weight` casts
        it; `.to(dtype)` changes neither.
        """
        if not self.frozen:
            q, scales = self.cast_weight()
            self.weight = nn.Parameter(q, requires_grad=False)
            self.register_buffer("weight_scale_inv", scales)
        return self

    def requantise(self) -> None:
        """Cast the weight again in the next call, and now if a CUDA graph reads its copy."""
        self._casts.requantise()

    def cast_weight(self, transpose: bool = False) -> Cast:
        """(q, scales) of weight (N, K), or of its transpose (K, N), with one scale for 128x128."""
        if self.frozen:
            scales: Any = self.weight_scale_inv
            q = self.weight.detach()
            return (q.mT, scales.mT) if transpose else (q, scales)

        cast = _cast_transposed if transpose else _cast
        if torch.compiler.is_compiling():
            return cast(self.weight.detach())
        if self.training and capturing(self.weight):
            self._casts.trained_by_graph()
            return cast(self.weight.detach())
        trained = self.training and self.weight.requires_grad
        return self._casts.of("transposed" if transpose else "plain", (self.weight,), cast, trained=trained)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        if x.dim() == 1:
            result: Tensor = self.forward(x.unsqueeze(0))
            return result.squeeze(0)
        if has_tangent(x, self.weight, self.bias):
            raise InputError(
                "FP8Linear has no forward-mode derivative: casts to float8 have none. Use torch.nn.Linear there, or "
                "reverse mode."
            )
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return _uncompiled(self, x)
        return _product(self, x)

    def extra_repr(self) -> str:
        """Sizes and options, for `print(model)`."""
        options = {"backend": self.backend, "grad_dtype": self.grad_dtype, "frozen": self.frozen or None}
        return super().extra_repr() + "".join(f", {k}={v}" for k, v in options.items() if v is not None)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight" and "_casts" in self.__dict__:  # FSDP sets every weight that it gathers
            self._casts.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.frozen:
            frozen_tensors = (self.weight, self.weight_scale_inv)
            convert = fn

            def fn(t: Tensor) -> Tensor:
                converted = convert(t)
                keep_dtype = converted.dtype != t.dtype and any(t is frozen for frozen in frozen_tensors)
                return t.to(converted.device) if keep_dtype else converted

        self._casts.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if self.frozen and isinstance(weight, Tensor) and weight.dtype != E4M3:
            q, scales = per_block_cast_to_fp8(weight.detach().to(self.weight.device))
            state_dict = {**state_dict, f"{prefix}weight": q, f"{prefix}weight_scale_inv": scales}
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._casts.written()


def fp8_linear(x: Tensor, weight: Cast, bias: Tensor | None, dtype: torch.dtype, backend: str | None = None) -> Tensor:
    """x (..., K) @ weight (N, K).T + bias in `dtype`, with a weight in float8; no gradient."""
    q, scales = per_token_cast_to_fp8(x.detach().reshape(-1, x.shape[-1]))
    result = scaled_matmul(q, weight[0], scales, weight[1], bias=bias, trans_b=True, out_dtype=dtype, backend=backend)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], result.shape[-1])


def _cast(weight: Tensor) -> Cast:
    return per_block_cast_to_fp8(weight)


def _cast_transposed(weight: Tensor) -> Cast:
    return per_block_cast_to_fp8(weight, transpose=True)


def result_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype, else that of x."""
    device = x.device.type
    if x.dtype != torch.float64 and device in AUTOCASTS and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def _product(layer: FP8Linear, x: Tensor) -> Tensor:
    return fp8_linear(x, layer.cast_weight(), layer.bias, result_dtype(x), layer.backend)


def _uncompiled(layer: FP8Linear, x: Tensor) -> Tensor:
    """Run `_trained` outside torch.compile.  Dynamo takes a second to import, so skip it unless it is loaded."""
    dynamo = sys.modules.get("torch._dynamo")
    result: Tensor = (_trained if dynamo is None else dynamo.disable(_trained))(layer, x)
    return result


def _trained(layer: FP8Linear, x: Tensor) -> Tensor:
    """The forward of a call that needs a gradient."""
    weight = layer.weight
    if weight.requires_grad and layer.frozen:
        raise InputError(
            "FP8Linear: a gradient of a frozen weight is wanted, which has no master. Train another layer."
        )
    if layer.grad_dtype is not None and weight.requires_grad:
        if not weight.is_leaf:
            raise InputError(
                "FP8Linear: grad_dtype needs weight to be a parameter, and here it is computed from others, to which "
                "no gradient would go on. Remove its parametrization, or leave grad_dtype away."
            )
        for parameter in layer.parameters():
            if parameter.requires_grad and parameter.grad_dtype != layer.grad_dtype:
                parameter.grad_dtype = layer.grad_dtype
    result: Tensor = _Products.apply(x, weight, layer.bias, layer)
    return result


class _Products(torch.autograd.Function):
    """The product of the forward, and the products of both gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FP8Linear) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.layer, ctx.wish, ctx.x_dtype = layer, resolve(layer.backend), x.dtype
        return _product(layer, x)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that this pass needs; differentiating one of them raises InputError."""
        x, _ = ctx.saved_tensors  # weight is saved so that autograd detects a change in between
        to_x, to_weight, to_bias = (*(node for node, _ in ctx.next_functions), None)[:3]
        layer: FP8Linear = ctx.layer
        backend, mode = ctx.wish
        dx = dweight = dbias = None
        # A preference, not a demand: the gradients have other layouts
        with use_backend(backend.rstrip("!")), numerics(mode), torch.no_grad():
            rows = dz.reshape(-1, dz.shape[-1])
            if is_needed(to_x):
                dx = fp8_linear(dz, layer.cast_weight(transpose=True), None, ctx.x_dtype)
            if is_needed(to_weight):
                dweight = _weight_gradient(layer, to_weight, rows, x.reshape(-1, x.shape[-1]))
            if is_needed(to_bias):
                dbias = rows.sum(0, dtype=torch.float32)
        if torch.is_grad_enabled():
            dx, dweight, dbias = forbid_second_derivative("FP8Linear", dx, dweight, dbias)
        return dx, dweight, dbias, None


def weight_gradient(dz: Tensor, x: Tensor, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """dz (T, N).T @ x (T, K), with one scale for 128 tokens of a channel; added in place to a float32 `total`."""
    padding = -dz.shape[0] % _VECTOR
    parts = [per_channel_cast_to_fp8(pad(t, (0, 0, 0, padding)) if padding else t, transpose=True) for t in (dz, x)]
    (left, scale_a), (right, scale_b) = parts
    return scaled_matmul(left, right, scale_a, scale_b, trans_b=True, c=total, out=total, out_dtype=dtype)


def _weight_gradient(layer: FP8Linear, node: Any, dz: Tensor, x: Tensor) -> Tensor | None:
    """The gradient for autograd to add, or None if the product added it to `weight.grad`."""
    if layer.grad_dtype is None:
        return weight_gradient(dz, x, layer.weight.dtype)
    grad = gradient_to_accumulate(layer.weight, node)
    result = weight_gradient(dz, x, torch.float32, grad)
    return result if grad is None else None
