"""vLLM's norms, gates and rotary embeddings with our ops in `forward_cuda`, and vLLM's own where ours does not apply.

vLLM calls `forward_cuda` on NVIDIA's and AMD's GPUs where an op is enabled; everything else is inherited: parameters,
weight loading, `forward_native`, which is what a model compiled without custom ops runs.
"""

from typing import Any

from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import DynamicNTKAlphaRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.gemma4_rope import Gemma4RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from tilewright.ops.activation.gelu_and_mul import gelu_and_mul
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.plugins.vllm.functions import normalise, rotate
from tilewright.plugins.vllm.registries import replace_op

_ROTARY = (  # rotate as the first one does, by other tables
    RotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


class TilewrightRMSNorm(RMSNorm):
    """`rms_norm` and `add_rms_norm`; vLLM's for a variance over a part of the row, for a weight in another dtype than
    x, and under VLLM_BATCH_INVARIANT.
    """

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """x, or (x, residual) beside one: (..., hidden_size)."""
        has_weight = self.pass_weight if residual is None else self.pass_weight_add
        if (
            envs.VLLM_BATCH_INVARIANT
            or self.variance_size_override is not None
            or (has_weight and self.weight.dtype != x.dtype)
        ):
            return super().forward_cuda(x, residual)
        return normalise(x, residual, self.weight.data if has_weight else None, self.variance_epsilon)


class TilewrightGemmaRMSNorm(GemmaRMSNorm):
    """`rms_norm` and `add_rms_norm` with 1 added to the weight in float32."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """x, or (x, residual) beside one: (..., hidden_size)."""
        if envs.VLLM_BATCH_INVARIANT:
            return super().forward_cuda(x, residual)
        return normalise(x, residual, self.weight.data, self.variance_epsilon, offset=1.0)


class TilewrightSiluAndMul(SiluAndMul):
    """`silu_and_mul`."""

    def forward_cuda(self, x: Tensor) -> Tensor:
        """x: (..., 2 N) -> (..., N)."""
        return silu_and_mul(x)


class TilewrightGeluAndMul(GeluAndMul):
    """`gelu_and_mul`, by the error function or by tanh as the layer says."""

    def forward_cuda(self, x: Tensor) -> Tensor:
        """x: (..., 2 N) -> (..., N)."""
        return gelu_and_mul(x, approximate=self.approximate)


class _Rotation:
    """`apply_rope` over the table of a rotary embedding: whole or partial, of halves or of neighbours."""

    def forward_cuda(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """New tensors, where vLLM's kernel writes into query and key."""
        table = self._match_cos_sin_cache_dtype(query)
        return rotate(positions, query, key, table, self.head_size, interleaved=not self.is_neox_style)


def _rotating(original: type) -> type:
    """A subclass of vLLM's rotary embedding that rotates with our op."""
    return type(f"Tilewright{original.__name__}", (_Rotation, original), {"__module__": __name__})


_REPLACEMENTS = {
    RMSNorm: TilewrightRMSNorm,
    GemmaRMSNorm: TilewrightGemmaRMSNorm,
    SiluAndMul: TilewrightSiluAndMul,
    GeluAndMul: TilewrightGeluAndMul,
    **{original: _rotating(original) for original in _ROTARY},
}


def register() -> None:
    """Replace vLLM's classes."""
    for original, replacement in _REPLACEMENTS.items():
        replace_op(replacement, original)
