"""vLLM's attention over its paged cache by `kv_append_`, `fmha_paged` and `fmha_decode`: backend TILEWRIGHT.

A step in which every sequence has one new token is `fmha_decode`, any other `fmha_paged`.  Neither looks at numbers on
the host, so vLLM may capture whole steps; the two differ, so it captures those whose queries are of one length.

Not taken, and refused by vLLM when it starts: attention of encoders, ALiBi, latent attention, heads over 256, caches in
other dtypes than the model's or e4m3, several ranks along the keys (context parallelism), queries that see later keys.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from tilewright.errors import InputError
from tilewright.plugins.vllm.functions import Step, attend
from tilewright.plugins.vllm.registries import ATTENTION

_E4M3 = ("fp8", "fp8_e4m3")
_WIDEST = 256


@dataclass
class TilewrightMetadata(AttentionMetadata):
    """What layers of one kind share in a forward pass."""

    step: Step


class TilewrightMetadataBuilder(AttentionMetadataBuilder[TilewrightMetadata]):
    """Takes what vLLM has computed, as it lies on the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TilewrightMetadata:
        """Raise InputError for queries that see later keys."""
        common = common_attn_metadata
        if common.causal is not True:
            raise InputError(f"vLLM's attention backend {ATTENTION}: a batch is not causal. Choose another backend.")
        return TilewrightMetadata(
            Step(
                common.num_actual_tokens,
                common.max_query_len,
                common.query_start_loc,
                common.seq_lens,
                common.block_table_tensor,
            )
        )


class TilewrightAttentionImpl(AttentionImpl[TilewrightMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            what = f"attention of type {attn_type}" if alibi_slopes is None else "ALiBi"
            raise InputError(f"vLLM's attention backend {ATTENTION} does not take {what}. Choose another backend.")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window, self.softcap, self.sinks = sliding_window, logits_soft_cap or None, sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.writes = kv_sharing_target_layer_name is None  # else another layer's keys are read

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TilewrightMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values, and write `output`.

        query, output: (tokens, num_heads, head_size).   key, value: (tokens, num_kv_heads, head_size).
        kv_cache: (pages, num_kv_heads, page_size, 2 * head_size).   attn_metadata: None while vLLM measures memory.
        """
        if output_scale is not None or output_block_scale is not None:
            raise InputError(f"vLLM's attention backend {ATTENTION} does not quantise its output.")
        if attn_metadata is None:
            return output.zero_()
        scales = None
        if self.kv_cache_dtype in _E4M3:
            kv_cache, scales = kv_cache.view(torch.float8_e4m3fn), (layer._k_scale, layer._v_scale)
        attend(
            query, key if self.writes else None, value if self.writes else None, kv_cache, attn_metadata.step, output,
            scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks, kv_scales=scales,
        )  # fmt: skip
        return output


class TilewrightAttentionBackend(AttentionBackend):
    """What vLLM asks before it chooses: see the head of this file."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_E4M3]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's list of backends."""
        return ATTENTION

    @staticmethod
    def get_impl_cls() -> type[TilewrightAttentionImpl]:
        """The class of a layer."""
        return TilewrightAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TilewrightMetadataBuilder]:
        """The class that describes a step."""
        return TilewrightMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Tokens of a page."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Heads that the kernels hold."""
        return head_size <= _WIDEST

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows of keys before a query."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks of heads, as gpt-oss has them."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Ampere and later GPUs."""
        return bool(capability >= DeviceCapability(8, 0))
