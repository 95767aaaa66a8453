"""A model of Qwen2.5-7B's shape with random bf16 weights, made on the GPU: a model whose sizes no shipped table has.

tilewright tune examples/qwen_7b.py:factory --budget 5m
"""

from typing import Any

import torch


def factory() -> tuple[Any, dict[str, torch.Tensor]]:
    """(model on the GPU, one prompt of 2048 random tokens).  Needs 16 GB of device memory; no download."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM._from_config(config).eval()  # as `from_config`, in the config's dtype
        prompt = torch.randint(config.vocab_size, (1, 2048))
    model.generation_config.eos_token_id = None  # random weights must not stop early
    model.generation_config.pad_token_id = 0
    return model, {"input_ids": prompt}
