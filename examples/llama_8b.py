"""A model of Llama-3.1-8B's shape with random bf16 weights, made on the GPU: what there is to try the assistant on at
full size.

tilewright optimize examples/llama_8b.py:factory --html build/llama_8b.html
"""

from typing import Any

import torch


def factory() -> tuple[Any, dict[str, torch.Tensor]]:
    """(model on the GPU, one prompt of 2048 random tokens).  Needs 17 GB of device memory; no download."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).eval()
            prompt = torch.randint(config.vocab_size, (1, 2048))
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.02)
    model.generation_config.eos_token_id = None  # random weights must not stop early
    model.generation_config.pad_token_id = 0
    return model, {"input_ids": prompt}
