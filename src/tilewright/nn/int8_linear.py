"""A linear layer with an int8 weight, a scale an output channel, and activations cast to int8 in every call (W8A8)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from tilewright.dispatch.derivatives import has_tangent
from tilewright.errors import InputError
from tilewright.nn.fp8_linear import result_dtype
from tilewright.nn.rotation import rotate as rotate_channels
from tilewright.nn.rotation import rotated_weight, unrotatable
from tilewright.ops.gemm.int8_matmul import MOST_K, int8_matmul
from tilewright.ops.quant.int8 import SOURCES, dequantise_rows
from tilewright.ops.quant.per_token_cast_to_int8 import per_token_cast_to_int8


class Int8Linear(nn.Module):
    """x @ weight.T + bias with int8 operands; takes the place of torch.nn.Linear for inference, or below adapters.

    weight: (out_features, in_features) int8 without a gradient.   weight_scale: (out_features,) float32, a buffer.
    bias: (out_features,) or None, a parameter that may be trained.
    x: (..., in_features) bf16|fp16|fp32, cast with one scale a token; the result has its dtype, or autocast's.

    Sums of products are exact; the float32 epilogue rounds once: `per_token_cast_to_int8`, then `int8_matmul`.
    backend: run both on exactly this backend or raise BackendError.
    smooth: the layer has divisors of its input's channels, `smooth` (in_features,) float32, a buffer (SmoothQuant), by
    which its weight was multiplied; `smoothing_factors` makes them.
    rotate: input and weight are rotated before they are cast (QuaRot): one `hadamard_transform` of x more.
    The gradient of x passes straight through the cast: dz @ (weight * weight_scale), in the dtype of dz.  There is no
    forward-mode derivative.  Loading a state_dict with a wider `weight` casts it; `.to(dtype)` changes the bias alone.
    """

    weight: nn.Parameter
    weight_scale: Tensor
    bias: nn.Parameter | None
    smooth: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        smooth: bool = False,
        rotate: bool = False,
        backend: str | None = None,
    ) -> None:
        """A layer of zeros, to load a state_dict into.  dtype: that of the bias."""
        super().__init__()
        self._options(in_features, rotate, backend)
        self.register_buffer("smooth", torch.ones(in_features, device=device) if smooth else None)
        q = torch.zeros(out_features, in_features, device=device, dtype=torch.int8)
        scales = torch.ones(out_features, device=device, dtype=torch.float32)
        self._hold(q, scales, nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None)

    def _options(self, in_features: int, rotate: bool, backend: str | None) -> None:
        if reason := unfit(in_features) or (rotate and unrotatable(in_features)):
            raise InputError(f"Int8Linear: {reason}")
        self.rotate, self.backend = rotate, backend

    def _hold(self, q: Tensor, scales: Tensor, bias: nn.Parameter | None) -> None:
        self.out_features, self.in_features = q.shape
        self.weight = nn.Parameter(q, requires_grad=False)
        self.register_buffer("weight_scale", scales)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, smooth: Tensor | None = None, rotate: bool = False, backend: str | None = None
    ) -> Self:
        """A layer with the cast weight of `linear`, whose bias it shares.   smooth: (in_features,), divisors of x."""
        if linear.weight.dtype not in SOURCES:
            raise InputError(f"Int8Linear: weight is {linear.weight.dtype}; needs bfloat16, float16 or float32.")
        if smooth is not None and tuple(smooth.shape) != (linear.in_features,):
            raise InputError(f"Int8Linear: smooth is {tuple(smooth.shape)}; needs ({linear.in_features},).")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._options(linear.in_features, rotate, backend)
        layer.register_buffer("smooth", None if smooth is None else smooth.detach().to(linear.weight.device).float())
        layer._hold(*_cast(linear.weight, layer.smooth, rotate), linear.bias)
        layer.training = linear.training
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        if x.dtype not in SOURCES:
            raise InputError(f"Int8Linear: x is {x.dtype}; needs bfloat16, float16 or float32.")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise InputError(f"Int8Linear: x is {tuple(x.shape)}; needs (..., {self.in_features}).")
        if has_tangent(x, self.bias):
            raise InputError(
                "Int8Linear has no forward-mode derivative: casts to int8 have none. Use torch.nn.Linear there, or "
                "reverse mode."
            )
        rows = x.reshape(x.shape[:-1].numel(), self.in_features)
        if self.rotate:
            rows = rotate_channels(rows, self.backend)
        arguments = rows, self.weight, self.weight_scale, self.smooth, self.bias, result_dtype(x), self.backend
        trained = rows.requires_grad or (self.bias is not None and self.bias.requires_grad)
        result: Tensor = _Product.apply(*arguments) if torch.is_grad_enabled() and trained else _forward(*arguments)
        return result.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        options = {"smooth": self.smooth is not None, "rotate": self.rotate}
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return text + "".join(f", {name}=True" for name, value in options.items() if value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        buffers = {id(self.weight_scale), id(self.smooth)}

        def keep_scales(t: Tensor) -> Tensor:
            converted = fn(t)
            return t.to(converted.device) if id(t) in buffers and converted.dtype != t.dtype else converted

        return super()._apply(keep_scales, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.dtype != torch.int8:
            smooth = None if self.smooth is None else state_dict.get(f"{prefix}smooth", self.smooth)
            device = self.weight.device
            q, scales = _cast(weight.to(device), None if smooth is None else smooth.to(device), self.rotate)
            state_dict = {**state_dict, f"{prefix}weight": q, f"{prefix}weight_scale": scales}
        super()._load_from_state_dict(state_dict, prefix, *args)


def unfit(in_features: int) -> str | None:
    """Why a layer of so many inputs cannot run in int8; None if it can."""
    return f"{in_features} inputs; sums of int32 hold {MOST_K}" if in_features > MOST_K else None


def _cast(weight: Tensor, smooth: Tensor | None, rotate: bool) -> tuple[Tensor, Tensor]:
    """Returns weight (N, K), multiplied by `smooth` and rotated, in int8, and its scales (N,)."""
    weight = weight.detach()
    if smooth is not None:
        weight = weight.to(torch.float32) * smooth
    q, scales = per_token_cast_to_int8(rotated_weight(weight) if rotate else weight)
    return q, scales.squeeze(1)


def _forward(
    rows: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    smooth: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    q, scales = per_token_cast_to_int8(rows, smooth=smooth, backend=backend)
    channels = weight_scale.unsqueeze(1)
    result: Tensor = int8_matmul(q, weight, scales, channels, bias=bias, out_dtype=dtype, backend=backend)
    return result


class _Product(torch.autograd.Function):
    """The product of the forward, and the gradients of x and of the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        smooth: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        backend: str | None,
    ) -> Tensor:
        ctx.save_for_backward(weight, weight_scale, smooth)
        ctx.x_dtype, ctx.bias_dtype = rows.dtype, None if bias is None else bias.dtype
        return _forward(rows, weight, weight_scale, smooth, bias, dtype, backend)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_scale, smooth = ctx.saved_tensors
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = dz @ dequantise_rows(weight, weight_scale, dz.dtype)
            dx = (dx if smooth is None else dx / smooth).to(ctx.x_dtype)
        if ctx.needs_input_grad[4]:
            dbias = dz.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, None, None, None, dbias, None, None
