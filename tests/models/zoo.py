"""Tiny random models of every architecture the patch promises, built from configurations alone."""

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


MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # prefix and suffix of transformers' Config class, and options
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "gpt_oss": (
        "GptOss",
        {
            "attn_implementation": "eager",  # for its attention sinks
            "head_dim": 8,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "glm": ("Glm", {"head_dim": 8}),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {"residual_multiplier": 0.5}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(name: str, **options: Any) -> nn.Module:
    """A model of `MODELS` in evaluation mode and float32; `options` override its configuration."""
    prefix, own = MODELS[name]
    return build_as(prefix, {**own, **options})


def build_as(prefix: str, options: dict[str, Any]) -> nn.Module:
    """The same of a prefix of transformers' classes."""
    import transformers

    options = {"attn_implementation": "sdpa", **_COMMON, **options}
    attention = options.pop("attn_implementation")
    config = getattr(transformers, f"{prefix}Config")(**options)
    cls = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    if attention == "sdpa" and not cls._supports_sdpa:  # Gemma 2 from transformers 5.22
        attention = "eager"
    config._attn_implementation = attention
    torch.manual_seed(0)
    model: nn.Module = cls(config)
    _randomise_vectors(model)
    return model.eval()


def _randomise_vectors(model: nn.Module) -> None:
    """Norm weights and biases start at ones and zeros, which would hide a wrong formula."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))


def build_on_sdpa(name: str) -> nn.Module:
    """A model that runs SDPA though its class may not support it, as those did that ignore their soft-capping there.

    transformers 5.22 builds such a class eagerly.
    """
    model = build(name)
    model.config._attn_implementation = "sdpa"
    return model


def checkpoint(model: nn.Module, *, reentrant: bool) -> None:
    """Keep no activations of layers; the method is another one from transformers 5.23 on."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """(batch, length) random token ids without the padding token."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
