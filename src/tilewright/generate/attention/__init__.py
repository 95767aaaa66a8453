"""The attention of the decode step, and how a model uses it for that step alone.

Transformers looks its attention function up by name, `config._attn_implementation`, on every call. We add our names to
its registry (no existing entry changes) and set the name on this model's config for the duration of a step.

  split_kv   ops.fmha_decode; any length from one graph; the default on a GPU
  sdpa       torch's scaled_dot_product_attention over the visible slots; the default elsewhere
  grouped    two batched products and a softmax over the visible slots
  model      the attention that the model already uses, with our mask; the default for models with eager attention

The prompt attends through what the model runs itself: SDPA, or after `patch` `ops.fmha` where that was measured faster.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.errors import InputError
from tilewright.models.attention import interface
from tilewright.models.attention.choice import lost_by_sdpa

NAMES = ("split_kv", "sdpa", "grouped", "model")
_PREFIX = "tilewright_decode_"


def resolve(model: Any, requested: str, device: torch.device) -> str:
    """The name to use for `requested`, which may be "auto". Raises InputError if the model cannot use it."""
    if requested not in ("auto", *NAMES):
        raise InputError(f"attention={requested!r} is unknown. Allowed: auto, {', '.join(NAMES)}.")
    current = decoder_config(model)._attn_implementation
    if current is not None and current.split("|")[-1].startswith(("flash", "flex")):
        raise InputError(
            f"the model attends through {current!r}, which takes no dense mask over a static cache. "
            'Call model.set_attn_implementation("sdpa") first.'
        )
    # An eager model may do more than softmax(QK)V, and a model without the registry cannot be redirected.  A model that
    # runs ops.fmha may have soft caps and sinks, which ops.fmha_decode has too.
    replaceable = current not in (None, "eager") and getattr(model, "_supports_attention_backend", False)
    plain = replaceable and not _has_scores(model)
    if requested == "auto":
        if replaceable and device.type == "cuda" and find_spec("triton") is not None:
            return "split_kv"
        return "sdpa" if plain else "model"
    if requested != "model" and not (replaceable if requested == "split_kv" else plain):
        raise InputError(
            f"attention={requested!r} replaces a registered scaled-dot-product attention; {type(model).__name__} uses "
            f'{current!r}. Use attention="model", or model.set_attn_implementation("sdpa") where the model supports it.'
        )
    return requested


def decoder_config(model: Any) -> Any:
    """The config object that the model's attention modules read."""
    return model.config.get_text_config(decoder=True)


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Let `model` attend through `name` inside the block. Only its own config object is touched, and restored."""
    config = decoder_config(model)
    before = config._attn_implementation
    if name == "split_kv" and _has_scores(model):
        config._attn_implementation = _register("split_kv_scores")
    elif name != "model":
        config._attn_implementation = _register(name)
    elif _has_scores(model):
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


def prefer_fast_sdpa(device: torch.device, *, padded: bool) -> AbstractContextManager[None]:
    """Order torch's GPU attention: cuDNN first, 1.8x of FLASH on a causal H200 prefill (526 against 287 TFLOP/s).

    Under left padding the rows of padding tokens are fully masked; cuDNN does not promise finite output there, and a
    NaN in a padding row would reach real tokens through the cache.
    """
    if device.type != "cuda":
        return nullcontext()
    fast = [] if padded else [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    order: AbstractContextManager[None] = sdpa_kernel(
        [*fast, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True
    )
    return order


def _has_scores(model: Any) -> bool:
    """True if the model runs ops.fmha for soft caps or sinks: steps that are not `split_kv` are eager, with additive
    masks.
    """
    current = decoder_config(model)._attn_implementation
    return current is not None and current.startswith(interface.NAME) and bool(lost_by_sdpa(model))


@cache
def _register(name: str) -> str:
    from transformers import AttentionInterface

    AttentionInterface.register(_PREFIX + name, _function(name))
    return _PREFIX + name


def _function(name: str) -> Callable[..., Any]:
    if name.startswith("split_kv"):
        from tilewright.generate.attention.split_kv import split_kv, split_kv_scores

        return split_kv if name == "split_kv" else split_kv_scores
    from tilewright.generate.attention import dense

    return dense.sdpa if name == "sdpa" else dense.grouped
