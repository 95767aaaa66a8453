"""Models as callers give them: objects, folders, and smaller models that draft."""

from typing import Any

import torch

from tilewright.dispatch.backends import module_exists
from tilewright.engine.model import PagedModel
from tilewright.errors import InputError
from tilewright.models import patch, quantize_
from tilewright.models.quantise import check_format


def load(
    folder: str, tokenizer: Any, device: str | torch.device | None, dtype: torch.dtype | str, quantize: str | None
) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, or of a name on the Hugging Face Hub; on a GPU the model is patched.

    Weights go straight to the device where accelerate is installed, else through the host's memory.
    Raises InputError for an unknown format, before anything is loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if quantize is not None:
        check_format("Engine: quantize", quantize, calibrated=False)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    direct = {"device_map": {"": place}} if module_exists("accelerate") else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **direct).to(place).eval()
    if quantize is not None:
        quantize_(model, quantize)
    if place.type == "cuda":
        patch(model)
    return model, AutoTokenizer.from_pretrained(folder) if tokenizer is None else tokenizer


def load_draft(draft_model: Any, target: PagedModel, tokenizer: Any, dtype: torch.dtype | str) -> PagedModel:
    """The model that drafts for `target`, given or from a folder.   tokenizer: the engine's.

    Raises InputError for another device or vocabulary than the target's, and for models that `PagedModel` refuses.
    """
    if isinstance(draft_model, str):
        draft_model, its = load(draft_model, None, target.device, dtype, None)
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
