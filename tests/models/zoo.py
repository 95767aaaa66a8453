"""Tiny random models of every architecture the patch promises, built from configurations alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {  # multi-head latent attention and mixture of experts of DeepSeek
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


def _build(name: str, **options: Any) -> nn.Module:
    """`name` is the prefix of transformers' Config and ForCausalLM classes."""
    import transformers

    attention = options.pop("attn_implementation", "sdpa")
    config = getattr(transformers, f"{name.removesuffix('Text')}{'Text' if name.endswith('Text') else ''}Config")(
        **{**_COMMON, **options}
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    _randomise_vectors(model)
    return model.eval()


def _randomise_vectors(model: nn.Module) -> None:
    """Norm weights and biases start at ones and zeros, which would hide a wrong formula."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": lambda **o: _build("Llama", **o),
    "qwen2": lambda **o: _build("Qwen2", **o),
    "qwen3": lambda **o: _build("Qwen3", head_dim=8, **o),
    "mistral": lambda **o: _build("Mistral", **{"sliding_window": 8, **o}),
    "gemma2": lambda **o: _build("Gemma2", head_dim=8, sliding_window=8, query_pre_attn_scalar=8, **o),
    "gemma3": lambda **o: _build("Gemma3Text", head_dim=8, sliding_window=8, query_pre_attn_scalar=8, **o),
    "phi3": lambda **o: _build("Phi3", **o),
    "deepseek_v2": lambda **o: _build("DeepseekV2", **{**_LATENT, "topk_method": "group_limited_greedy", **o}),
    "deepseek_v3": lambda **o: _build("DeepseekV3", **{**_LATENT, **o}),
    "granite": lambda **o: _build("Granite", **{"residual_multiplier": 0.5, **o}),
    "mixtral": lambda **o: _build("Mixtral", num_local_experts=4, num_experts_per_tok=2, **o),
}


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """(batch, length) random token ids without the padding token."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
