"""Models, prompts and parameters as callers give them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from tilewright.engine.model import PagedModel
from tilewright.engine.params import SamplingParams
from tilewright.errors import InputError

Prompt = str | Sequence[int]


def load(folder: str, tokenizer: Any, device: str | torch.device | None, dtype: torch.dtype | str) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, or of a name on the Hugging Face Hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()  # device_map needs accelerate
    return model, AutoTokenizer.from_pretrained(folder) if tokenizer is None else tokenizer


def load_draft(draft_model: Any, target: PagedModel, tokenizer: Any, dtype: torch.dtype | str) -> PagedModel:
    """The model that drafts for `target`, given or from a folder.   tokenizer: the engine's.

    Raises InputError for another device or vocabulary than the target's, and for models that `PagedModel` refuses.
    """
    if isinstance(draft_model, str):
        draft_model, its = load(draft_model, None, target.device, dtype)
        check_draft_tokenizer(its, tokenizer)
    try:
        draft = PagedModel(draft_model)
    except InputError as error:
        raise InputError(f"Engine: draft_model: {error}") from error
    for what, its, needed in (
        ("is on", draft.device, target.device),
        ("has a vocabulary of", draft.vocabulary, target.vocabulary),
        ("has embeddings of", _embeddings(draft), _embeddings(target)),
    ):
        if its != needed:
            raise InputError(f"Engine: draft_model {what} {its}; the model {what} {needed}, and both have to agree.")
    return draft


def check_draft_tokenizer(its: Any, tokenizer: Any) -> None:
    """Raise InputError where both tokenizers tell their vocabularies, and those differ."""
    if hasattr(tokenizer, "get_vocab") and hasattr(its, "get_vocab") and its.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            "Engine: draft_model has a tokenizer with another vocabulary than the model's; both must agree."
        )


def _embeddings(model: PagedModel) -> int:
    count: int = model.model.get_input_embeddings().num_embeddings
    return count


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
