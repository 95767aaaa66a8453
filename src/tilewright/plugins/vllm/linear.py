"""vLLM's linear layers by our products: `--quantization tilewright` in the weights' dtype, `tilewright_fp8` in float8.

Both read checkpoints that are not quantised.  vLLM's parallel layers stay what they are, a slice of a weight on each
rank; embeddings, heads and experts too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from tilewright.nn.fp8_linear import fp8_linear
from tilewright.ops.gemm.matmul import matmul
from tilewright.ops.quant.per_block_cast_to_fp8 import per_block_cast_to_fp8

_SMALLEST, _UNIT = 512, 16  # features, as in `patch(model, fp8=True)`


@register_weight_loader_v2_supported_method
class TilewrightLinearMethod(UnquantizedLinearMethod):
    """x @ weight.T + bias by `matmul`."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (..., K) -> (..., N)."""
        weight: Any = layer.weight
        if x.dtype != weight.dtype:
            result: Tensor = super().apply(layer, x, bias)
            return result
        return matmul(x, weight, bias=bias, trans_b=True)


@register_weight_loader_v2_supported_method
class TilewrightFp8LinearMethod(TilewrightLinearMethod):
    """x @ weight.T + bias in e4m3, 1x128 scales of x beside 128x128 of the weight, which is cast once, after loading.

    Layers with fewer than 512 inputs or outputs on a rank, or a number of them that is no multiple of 16, keep their
    weight and its dtype.
    """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Put e4m3 in place of the weight, and its scales beside it."""
        super().process_weights_after_loading(layer)
        weight: Any = layer.weight
        if min(weight.shape) < _SMALLEST or any(size % _UNIT for size in weight.shape):
            return
        q, scales = per_block_cast_to_fp8(weight.detach())
        layer.weight = Parameter(q, requires_grad=False)
        layer.register_buffer("weight_scale_inv", scales, persistent=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (..., K) -> (..., N)."""
        scales: Any = getattr(layer, "weight_scale_inv", None)
        weight: Any = layer.weight
        return super().apply(layer, x, bias) if scales is None else fp8_linear(x, (weight, scales), bias, x.dtype)


class TilewrightConfig(QuantizationConfig):
    """`--quantization tilewright`."""

    name, method, capability = "tilewright", TilewrightLinearMethod, 80

    def get_name(self) -> str:
        """What the command line names."""
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of x."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """10 times the least compute capability."""
        return cls.capability

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: there is nothing to configure."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TilewrightConfig":
        """The same whatever a checkpoint says."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Ours for a linear layer, None for others, which are vLLM's then."""
        return self.method() if isinstance(layer, LinearBase) else None


class TilewrightFp8Config(TilewrightConfig):
    """`--quantization tilewright_fp8`."""

    name, method, capability = "tilewright_fp8", TilewrightFp8LinearMethod, 90


def register() -> None:
    """Have both names in vLLM's list."""
    for config in (TilewrightConfig, TilewrightFp8Config):
        if config.name not in QUANTIZATION_METHODS:
            register_quantization_config(config.name)(config)
