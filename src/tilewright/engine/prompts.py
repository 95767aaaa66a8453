"""Prompts and parameters as callers give them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tilewright.engine.params import SamplingParams
from tilewright.errors import InputError

Prompt = str | Sequence[int]


def is_tokens(prompts: Any) -> bool:
    """One prompt of tokens, rather than several prompts?"""
    with suppress(TypeError, IndexError, KeyError):
        return isinstance(prompts[0], int)
    return False


def tokens_of(prompt: Prompt, tokenizer: Any, vocabulary: int) -> list[int]:
    """Tokens of a prompt.   Raises InputError where there are none, and for those outside of the vocabulary."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError("Engine: a prompt of text needs a tokenizer: Engine(model, tokenizer). Or give tokens.")
        numbers: list[int] = list(tokenizer(prompt)["input_ids"])
    else:
        numbers = [int(token) for token in prompt]
    if not numbers:
        raise InputError("Engine: the prompt has no tokens.")
    if not 0 <= min(numbers) <= max(numbers) < vocabulary:
        raise InputError(
            f"Engine: the prompt has tokens from {min(numbers)} to {max(numbers)}; the vocabulary has {vocabulary}."
        )
    return numbers


def check_params(params: SamplingParams, tokenizer: Any, logits: int) -> None:
    """Raise InputError for parameters that this engine cannot apply.   logits: V of the model."""
    if params.stops and tokenizer is None:
        raise InputError("Engine: stop strings need a tokenizer: Engine(model, tokenizer). Or use stop_tokens.")
    wrong = [token for token in params.logit_bias if not 0 <= token < logits]
    if wrong:
        raise InputError(f"Engine: logit_bias has tokens {wrong}; the model has logits of 0 to {logits - 1}.")
