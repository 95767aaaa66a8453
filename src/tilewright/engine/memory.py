"""How many tokens an engine has memory for."""

from collections.abc import Sequence

import torch

from tilewright.engine.model import PagedModel
from tilewright.errors import InputError

_SHARE = 0.9  # of the device memory that is free beside the models, for the cache
_HOST_CACHE = 1 << 30  # bytes of the cache on a CPU, at most


def longest_context(models: Sequence[PagedModel], max_context: int | None) -> int:
    """Tokens of a prompt and its answer: by default what all models take, at most 8192.

    Raises InputError for more than they take.
    """
    configs = [model.model.config.get_text_config(decoder=True) for model in models]
    longest = min(getattr(config, "max_position_embeddings", None) or 8192 for config in configs)
    context = min(longest, 8192) if max_context is None else max_context
    if not 2 <= context <= longest:
        which = "this model takes" if len(models) == 1 else "this model and its draft_model take"
        raise InputError(f"Engine: max_context is {context}; {which} 2 to {longest}.")
    return context


def count_pages(
    models: Sequence[PagedModel], cache_tokens: int | None, page_size: int, kv_dtype: torch.dtype | None, most: int
) -> int:
    """Number of pages, each for the same tokens of all models.   most: beyond which no more are of use.

    Raises InputError where there is no room for one.
    """
    if cache_tokens is not None:
        if cache_tokens < page_size:
            raise InputError(f"Engine: cache_tokens is {cache_tokens}, less than a page of {page_size}.")
        return cache_tokens // page_size
    room, device = _HOST_CACHE, models[0].device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        room = int(_SHARE * torch.cuda.mem_get_info(device)[0])
    pages = room // (sum(model.bytes_per_token(kv_dtype) for model in models) * page_size)
    if pages < 1:
        raise InputError(f"Engine: {room} bytes of memory hold no page of {page_size} tokens.")
    return min(most, pages)
