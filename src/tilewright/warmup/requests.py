"""Run a language model as a request does: a prefill, and decoding steps with a growing cache."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 16
"""Decoding steps with a growing cache: within 16 its length is a multiple of 16 once, which kernels specialise on."""


def run_requests(model: Any, prompts: Iterable[Tensor], new_tokens: int, **options: Any) -> Iterator[float]:
    """Run the model on each of `prompts`, token ids (B, S), and at most `STEPS` decoding steps after each.

    Yields before each call of the model: how many such calls a request for `new_tokens` tokens makes.   options: those
    of the prefill.   Tensors may be fake.
    """
    for ids in prompts:
        yield 1.0
        prefill = model(input_ids=ids, use_cache=True, **options)
        step = torch.ones(ids.shape[0], 1, dtype=torch.long, device=ids.device)
        steps = min(new_tokens, STEPS)
        for _ in range(steps):
            yield new_tokens / steps
            model(input_ids=step, past_key_values=prefill.past_key_values, use_cache=True)


def prompts_of(batch: int, tokens: Iterable[int], device: torch.device) -> Iterator[Tensor]:
    """Token ids (batch, S) for each S in `tokens`; which tokens they are makes no difference to sizes."""
    return (torch.ones(batch, length, dtype=torch.long, device=device) for length in tokens)


def is_language_model(model: nn.Module) -> bool:
    """Whether `model` is a causal language model of transformers: it can generate, and its config has a vocabulary."""
    can_generate = getattr(model, "can_generate", None)
    return (
        callable(getattr(model, "generate", None))
        and callable(can_generate)
        and bool(can_generate())
        and hasattr(getattr(model, "config", None), "vocab_size")
        and not getattr(model.config, "is_encoder_decoder", False)
        and takes(model, "input_ids")
    )


def takes(model: nn.Module, name: str) -> bool:
    """Whether `model.forward` names this argument."""
    return name in inspect.signature(model.forward).parameters
