"""Every name of transformers outside its stable public API; the one file to look at when a release moves one.

Releases 5.14 to 5.23 are supported and tested (`scripts/versions.py`); `pyproject.toml` declares the same range. Public
names (`AutoConfig`, `AttentionInterface`, `PreTrainedModel`) are imported where they are used.

| name | since | remark |
|---|---|---|
| `cache_utils.Cache`, `CacheLayerMixin` | 5.0 | base classes of our cache; `Cache(layers=[...])` |
| `cache_utils.get_layer_types_and_kwargs` | 5.14 | options in one dict; from 5.19 one dict a layer |
| `masking_utils` | 5.0 | the functions masks are made of; a version may lack some |
| `integrations.sdpa_attention.sdpa_attention_forward` | 5.0 | |
| `initialization.no_init_weights` | 5.0 | |
| `GenerationConfig._get_default_generation_params` | 5.0 | |
| `modeling_layers.GradientCheckpointingLayer` | 5.0 | from 5.23 it wraps the `forward` of its subclasses |
| `modeling_utils.PreTrainedModel.__init_subclass__` | 5.0 | derives `config_class`, registers nothing |
| `loss.loss_utils.ForCausalLMLoss` | 5.0 | what `loss_function` of a causal language model is |
| `modeling_outputs.MoeModelOutputWithPast` | 5.0 | a decoder's result, with all fields that a head reads |
| `expand_kv` of layers of latent attention | 5.17, not in 5.14 | from latents to keys and values of every head |
| `PagedAttentionCache` | 5.14 | windows right from 5.16, other structure from 5.18; from 5.19 no foreign names |

Transformers is imported inside the functions, and always by the submodule: the package itself is a lazy module, which
the Dynamo of torch 2.11 does not accept.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from tilewright.errors import InputError

EXPAND_LATENTS = "expand_kv"
"""The method of layers of latent attention that makes keys and values of latents, just before their attention."""
SUPPORTED = ((5, 14), (5, 23))  # the oldest and the newest release, both included


def cache_bases() -> tuple[type[Any], type[Any]]:
    """`Cache` and `CacheLayerMixin`: what a cache and its layers derive from."""
    try:
        from transformers.cache_utils import Cache, CacheLayerMixin
    except ModuleNotFoundError as error:
        raise ImportError("tilewright.generate needs transformers: pip install 'tilewright[hf]'.") from error
    return Cache, CacheLayerMixin


def layer_types(config: Any) -> tuple[list[str], list[int | None]]:
    """Kind of each layer that stores keys and values ("full_attention", ...), and its window where it slides.

    config: of the decoder. Last layers that read the keys of others (Gemma 3n) are left out: up to 5.18 transformers
    does not list them, later it calls them "dummy".
    """
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, options = get_layer_types_and_kwargs(config)
    if isinstance(options, dict):
        options = [options if kind == "sliding_attention" else {} for kind in kinds]
    count = max((number for number, kind in enumerate(kinds, 1) if kind != "dummy"), default=0)
    return list(kinds[:count]), [each.get("sliding_window") for each in options[:count]]


def mask_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`causal_mask_function` and `bidirectional_mask_function`."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    return causal_mask_function, bidirectional_mask_function


def sdpa_mask() -> Callable[..., Any]:
    """The function that computes the elements of a mask, (B, 1, S_q, S_k) bool."""
    from transformers.masking_utils import sdpa_mask

    function: Callable[..., Any] = sdpa_mask
    return function


def mask_maker(name: str) -> Callable[..., Any] | None:
    """A function of `masking_utils` that makes mask functions ("and_masks", ...); None where a release has none."""
    from transformers import masking_utils

    return getattr(masking_utils, name, None)


def sdpa_attention_forward() -> Callable[..., Any]:
    """The attention function of layers that run "sdpa"."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    function: Callable[..., Any] = sdpa_attention_forward
    return function


class PagedLayer(NamedTuple):
    """Where a paged cache keeps the keys and values of one layer."""

    group: int  # of layers that have one attention type and one block table
    is_first: bool  # of its group
    window: int | None  # keys that a query sees, itself included; None: all before it
    k_pages: Tensor | None  # (pages, page_size, H_kv, D); None in a layer with a window, whose keys are in no order
    v_pages: Tensor | None


def takes_paged_names() -> bool:
    """True if continuous batching takes any registered "paged|..." name; from 5.19 on it refuses all but its own."""
    from transformers import AttentionInterface

    return "paged|sdpa" in AttentionInterface()


def has_right_windows() -> bool:
    """True if a paged cache returns the keys of a window where a prompt was cut into chunks: since 5.16."""
    from transformers import __version__

    return tuple(int(number) for number in __version__.split(".")[:2]) >= (5, 16)


def paged_layer(cache: Any, layer: int) -> PagedLayer:
    """The pages of a layer in the PagedAttentionCache of continuous batching.

    Raises InputError for a layer with a window whose cache is not right.
    """
    if hasattr(cache, "layer_to_allocator"):  # 5.18
        allocator = cache.layer_to_allocator[layer]
        window = getattr(allocator, "sliding_window", None)
        pages = allocator.get_cache_for_block_table(layer) if window is None else (None, None)
        return PagedLayer(allocator.index, layer == allocator.layer_indices[0], window, *pages)
    group, place = cache.layer_index_to_group_indices[layer]
    window = cache.sliding_windows[layer]  # 1 without one
    if window > 1 and not has_right_windows():
        raise InputError(
            "attention: the paged cache of transformers 5.14 and 5.15 hands wrong keys to layers with a window, "
            "those of its own attention too. Use 5.16 or newer."
        )
    if window > 1:
        return PagedLayer(group, place == 0, window, None, None)
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    return PagedLayer(group, place == 0, None, cache.key_cache[place].view(shape), cache.value_cache[place].view(shape))


def no_init_weights() -> AbstractContextManager[None]:
    """A context in which models are built with uninitialised weights: nothing is drawn, nothing is written."""
    from transformers.initialization import no_init_weights

    context: AbstractContextManager[None] = no_init_weights()
    return context


def default_generation_settings(config: Any) -> dict[str, Any]:
    """The value that `generate` uses for each setting given neither in the call nor in a GenerationConfig."""
    settings: dict[str, Any] = config._get_default_generation_params()
    return settings


def wraps_subclasses(cls: type) -> bool:
    """True if the `__init_subclass__` of `cls` is the one that wraps `forward` in gradient checkpointing (from 5.23).

    It registers nothing, and it checkpoints a subclass with our `forward` as it does the parent.
    """
    layers = sys.modules.get("transformers.modeling_layers")
    layer = getattr(layers, "GradientCheckpointingLayer", object)
    hook = getattr(layer.__init_subclass__, "__func__", None)
    return hook is not None and getattr(cls.__init_subclass__, "__func__", None) is hook


def is_subclassed_freely(cls: type) -> bool:
    """True if `__init_subclass__` of `cls` does nothing that a subclass with our `forward` would have to avoid.

    That is the hook of `wraps_subclasses`, and that of `PreTrainedModel`, which sets `config_class` on the subclass.
    """
    if wraps_subclasses(cls):
        return True
    models = sys.modules.get("transformers.modeling_utils")
    hook = getattr(getattr(models, "PreTrainedModel", object).__init_subclass__, "__func__", None)
    return hook is not None and getattr(cls.__init_subclass__, "__func__", None) is hook


def causal_lm_loss() -> Callable[..., Any] | None:
    """`ForCausalLMLoss`; None where transformers was not imported."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    return getattr(losses, "ForCausalLMLoss", None)


def decoder_output(hidden: Tensor) -> Any:
    """What a decoder returns to its head: the last hidden states (B, S, H), and None for whatever else is read."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return Output(last_hidden_state=hidden)
