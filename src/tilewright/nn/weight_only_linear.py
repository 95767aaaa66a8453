"""A linear layer with a weight of 4 or 8 bits and activations of 16: int8, int4, mxfp8, mxfp4 or nvfp4.

At few rows a layer is bound by the bytes of its weight, of which these formats have a half to a quarter.
"""

from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.nn.fp8_linear import result_dtype
from tilewright.nn.rotation import rotate as rotate_channels
from tilewright.nn.rotation import rotated_weight, unrotatable
from tilewright.ops.quant.cast_to_blocks import cast_to_blocks
from tilewright.ops.quant.dequantize_blocks import dequantize_blocks
from tilewright.ops.quant.microscale import FORMATS
from tilewright.ops.weight_only.block_matmul import block_matmul
from tilewright.ops.weight_only.dequantize_weight import dequantize_weight
from tilewright.ops.weight_only.quantize_weight import quantize_weight
from tilewright.ops.weight_only.weight_only_matmul import weight_only_matmul

WeightFormat = Literal["int8", "int4", "mxfp8", "mxfp4", "nvfp4"]
_NAMES = ("q", "scales", "tensor_scale")
FEW_ROWS, MOST_ROWS = 64, 16
"""Rows of products by integers, and by numbers with scales of blocks, beyond which a weight is made in x's dtype and
torch multiplies: a kernel that converts for each tile of rows would be bound by its conversions.
"""


def unfit(format: str, in_features: int) -> str | None:
    """Why a weight of so many inputs has no such format; None if it has."""
    if format not in get_args(WeightFormat):
        return f"format is {format!r}; allowed are {', '.join(map(repr, get_args(WeightFormat)))}"
    multiple = FORMATS[format].block if format in FORMATS else 2 if format == "int4" else 1
    return f"{in_features} inputs; {format} needs a multiple of {multiple}" if in_features % multiple else None


def quantise(weight: Tensor, format: str, rotate: bool = False) -> tuple[Tensor, ...]:
    """Returns (q, scales), for nvfp4 (q, scales, tensor_scale), of a weight (N, K), rotated first on demand."""
    weight = rotated_weight(weight) if rotate else weight.detach()
    if format in FORMATS:
        return cast_to_blocks(weight, format=format)
    return quantize_weight(weight, bits=4 if format == "int4" else 8)


def weight_only_linear(
    x: Tensor, parts: tuple[Tensor, ...], bias: Tensor | None, dtype: torch.dtype, backend: str | None = None
) -> Tensor:
    """Returns x (..., K) @ w.T + bias in `dtype`, w as `quantise` made it."""
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    blocks = parts[1].dtype.itemsize == 1
    if backend is None and rows.device.type == "cuda" and rows.shape[0] > (MOST_ROWS if blocks else FEW_ROWS):
        convert = dequantize_blocks if blocks else dequantize_weight
        result = nn.functional.linear(rows, convert(*parts, dtype=dtype), _in(bias, dtype))
    elif blocks:
        result = block_matmul(rows, *parts, bias=_in(bias, dtype), backend=backend)
    else:
        result = weight_only_matmul(rows, *parts, bias=_in(bias, dtype), backend=backend)
    return result.view(*x.shape[:-1], result.shape[-1])


def _in(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


class WeightOnlyLinear(nn.Module):
    """x @ w.T + bias with w in a format of 4 or 8 bits: takes the place of a torch.nn.Linear, for inference.

    format: "int8", "int4": integers with a bf16 scale for each 128 of a row; "mxfp8", "mxfp4", "nvfp4": numbers with a
    scale for each 32 or 16, see `ops.cast_to_blocks`.   x: (..., in_features) bf16|fp16|fp32; the result has its dtype,
    or autocast's.   Buffers q, scales and, of nvfp4, tensor_scale hold the weight and are what state_dict stores; they
    move with the module and keep their dtypes in `.to(dtype)`.  A state_dict with `weight` instead is quantised.

    rotate: x and the weight are rotated before the weight is quantised (QuaRot): one `hadamard_transform` of x more.

    A gradient goes to x and bias, through torch's own product; the weight has none.
    backend: run the products on exactly this backend or raise BackendError.
    Raises InputError for unknown formats and for in_features that a format's blocks do not divide.
    """

    q: Tensor
    scales: Tensor
    tensor_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: str = "int4",
        rotate: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self._initialise(nn.Linear(in_features, out_features, bias, device, dtype), format, rotate, backend)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, format: str = "int4", *, rotate: bool = False, backend: str | None = None
    ) -> Self:
        """A layer with the quantised weight of `linear`, whose bias it shares."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._initialise(linear, format, rotate, backend)
        return layer

    def _initialise(self, linear: nn.Linear, format: str, rotate: bool, backend: str | None) -> None:
        if reason := unfit(format, linear.in_features) or (rotate and unrotatable(linear.in_features)):
            raise InputError(f"WeightOnlyLinear: {reason}.")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format, self.rotate, self.backend = format, rotate, backend
        self.bias = linear.bias
        self.training = linear.training
        parts = quantise(linear.weight, format, rotate)
        for name, part in zip(_NAMES, (*parts, None)[:3], strict=False):
            self.register_buffer(name, part)

    def parts(self) -> tuple[Tensor, ...]:
        """(q, scales) or (q, scales, tensor_scale)."""
        return (self.q, self.scales) if self.tensor_scale is None else (self.q, self.scales, self.tensor_scale)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight (out_features, in_features) that the layer multiplies by; with `rotate` its input is rotated."""
        convert = dequantize_blocks if self.format in FORMATS else dequantize_weight
        result: Tensor = convert(*self.parts(), dtype=dtype)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        x = rotate_channels(x, self.backend) if self.rotate else x
        return weight_only_linear(x, self.parts(), self.bias, result_dtype(x), self.backend)

    def extra_repr(self) -> str:
        """Sizes and format, for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}{', rotate=True' if self.rotate else ''}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        parts = {id(part) for part in self.parts()}

        def keep(t: Tensor) -> Tensor:
            moved: Tensor = fn(t)
            if id(t) not in parts or (moved.dtype == t.dtype and moved.stride() == t.stride()):
                return moved
            # The strides of scales are their layout, and a cast would lose what a format means
            same = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=moved.device)
            return same.copy_(t)

        return super()._apply(keep, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor):
            parts = quantise(weight.to(self.q.device), self.format, self.rotate)
            named = {f"{prefix}{name}": part for name, part in zip(_NAMES, parts, strict=False)}
            state_dict = {**{key: t for key, t in state_dict.items() if key != f"{prefix}weight"}, **named}
            unexpected = args[3] if len(args) > 3 else []
            super()._load_from_state_dict(state_dict, prefix, *args)
            if f"{prefix}weight" in unexpected:
                unexpected.remove(f"{prefix}weight")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
