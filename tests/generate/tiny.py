"""Tiny random models whose greedy continuations wander: wide initial weights, or every token would repeat itself."""

import torch

VOCAB = 256
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
WINDOW = 24


def build(name: str, **overrides):
    """A model in fp32 and evaluation mode that never stops by itself."""
    import transformers

    extra = {"sliding_window": WINDOW} if name in ("gemma2", "mistral") else {}
    family = {"llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma2", "mistral": "Mistral"}[name]
    config = getattr(transformers, f"{family}Config")(**SHAPE | extra | overrides)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(batch: int, length: int, pads: int = 0):
    """Token ids (batch, length) and a mask whose last row starts with `pads` padding tokens."""
    ids = torch.randint(1, VOCAB, (batch, length))
    mask = torch.ones_like(ids)
    mask[-1, :pads] = 0
    return ids.masked_fill(mask == 0, 0), mask
