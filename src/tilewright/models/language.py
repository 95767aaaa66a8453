"""Tell language models from other modules by what they can do, not by their names."""

import inspect

from torch import nn


def is_language_model(model: nn.Module) -> bool:
    """A causal language model in Hugging Face's sense: it can generate and says how large its vocabulary is."""
    can = getattr(model, "can_generate", None)
    return (
        callable(getattr(model, "generate", None))
        and callable(can)
        and bool(can())
        and hasattr(getattr(model, "config", None), "vocab_size")
        and not getattr(model.config, "is_encoder_decoder", False)
        and takes(model, "input_ids")
    )


def takes(model: nn.Module, name: str) -> bool:
    """Whether `model.forward` names this argument."""
    return name in inspect.signature(model.forward).parameters
