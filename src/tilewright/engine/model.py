"""A Hugging Face decoder over pages: its forward pass for packed chunks of many sequences.

The model's code is transformers'.  Its attention layers look up "tilewright_pages", which stores new keys and values in
the pages of the layer and attends over them; a `Pages` that travels as an argument of forward says whose is what.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tilewright.engine.adapters import Adapters, Source
from tilewright.engine.latent import (
    EachToken,
    LatentLayer,
    LatentShape,
    attend,
    each_token,
    keeps_latents,
    kept_latents,
    latent_layers,
)
from tilewright.errors import InputError
from tilewright.generate.attention import decoder_config
from tilewright.models import transformers_names
from tilewright.models.attention.refused import refuse
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_paged import fmha_paged
from tilewright.ops.kvcache.kv_append_ import kv_append_

_NAME = "tilewright_pages"
_NEEDED = ("input_ids", "position_ids", "logits_to_keep")
_KINDS = {"full_attention", "sliding_attention"}
_calling: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
"""Held while the attention of a model is ours: several engines may have one model."""


class Layer(NamedTuple):
    """k: (pages, page_size, H_kv, D)   v: (pages, page_size, H_kv, D_v).   k_scale, v_scale: (pages, page_size, H_kv)
    float32 beside e4m3, one for each token and head; else None.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


class Shape(NamedTuple):
    """k: (H_kv, D) and v: (H_kv, D_v) of a layer, and the dtype of both."""

    k: tuple[int, int]
    v: tuple[int, int]
    dtype: torch.dtype

    def bytes_per_token(self, kv_dtype: torch.dtype | None) -> int:
        (heads, d), (_, d_v) = self.k, self.v
        return heads * (d + d_v) * (kv_dtype or self.dtype).itemsize + (0 if kv_dtype is None else 8 * heads)

    def allocate(self, pages: int, page_size: int, kv_dtype: torch.dtype | None, device: torch.device) -> Layer:
        """Zeros."""
        size, dtype = (pages, page_size), kv_dtype or self.dtype
        k, v = (torch.zeros(*size, *each, dtype=dtype, device=device) for each in (self.k, self.v))
        if kv_dtype is None:
            return Layer(k, v, None, None)
        return Layer(k, v, *(torch.ones(*size, each[0], device=device) for each in (self.k, self.v)))


class Pages(NamedTuple):
    """One step.   lengths: (B,) int32, new tokens included.   block_table: (B, max_pages) int32.
    cu_seqlens: (B + 1,) int32; None where every sequence has one new token.   each_token: beside cu_seqlens, for
    layers that cache latents.
    """

    layers: dict[int, Layer | LatentLayer]
    lengths: Tensor
    block_table: Tensor
    cu_seqlens: Tensor | None
    each_token: EachToken | None = None


class _Shapes(dict[int, Shape | LatentShape]):
    """What a first forward pass finds out of each layer."""


class PagedModel:
    """Raises InputError for a model without this contract: `input_ids`, `position_ids` and `logits_to_keep` in forward,
    layers of full or sliding attention that store their own keys, all parameters on one device, evaluation mode.

    Layers of latent attention cache latents, where transformers' layer has a method that expands them and its
    projection is a plain linear layer; others cache keys and values.  The model's config names our attention during a
    forward pass of ours, and what it named before at other times.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = _checked_device(model)
        _register()
        # A mask that transformers hands on as it is: making one would look at positions on the host
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        kinds = getattr(decoder_config(model), "layer_types", None)
        self._mask = mask if kinds is None else dict.fromkeys(kinds, mask)
        self.shapes, self.adapters = _Shapes(), Adapters(model, {})
        self._latent_layers = latent_layers(model)
        self.vocabulary = self._probe(1)
        expected = len(transformers_names.layer_types(decoder_config(model))[0])
        if sorted(self.shapes) != list(range(expected)):
            raise InputError(
                f"{type(model).__name__}: {len(self.shapes)} of {expected} layers look attention up by name; an engine "
                "needs all of them."
            )
        self.layers: dict[int, Layer | LatentLayer] = {}

    def adapt(self, sources: Mapping[str, Source]) -> None:
        """Have LoRA adapters by name, until `adapters.close`.   Raises InputError for those that do not fit."""
        self.adapters = Adapters(self.model, sources)
        try:
            self._probe(3)
        except InputError:
            self.adapters.close()
            raise

    def _probe(self, tokens: int) -> int:
        """Compute some tokens without a cache, adapters that there are included; returns V of the logits."""
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.device)
        with self._attention(), self.adapters.applied(ids[0]), torch.inference_mode():
            return self._forward(ids, ids, ids[0, :1], self.shapes).shape[1]

    def bytes_per_token(self, kv_dtype: torch.dtype | None = None) -> int:
        """Bytes of keys and values of one token in all layers, their scales included.   kv_dtype: as in `allocate`."""
        return sum(shape.bytes_per_token(kv_dtype) for shape in self.shapes.values())

    def allocate(self, pages: int, page_size: int, kv_dtype: torch.dtype | None = None) -> None:
        """Have caches of that many pages, zeros.   kv_dtype: float8_e4m3fn, or None for that of the model's keys.

        Raises InputError where an op does not take e4m3 for this model.
        """
        self.layers = {
            index: shape.allocate(pages, page_size, kv_dtype, self.device) for index, shape in self.shapes.items()
        }
        if kv_dtype is not None:
            self._try()

    def _try(self) -> None:
        """Compute a step of one sequence of length 0, which writes nothing."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        length, table = torch.zeros(2, 1, dtype=torch.int32, device=self.device)
        with torch.inference_mode():
            self.forward(zero, zero, zero, Pages(self.layers, length, table[None], None))

    def forward(
        self, ids: Tensor, positions: Tensor, rows: Tensor, pages: Pages, adapters: Tensor | None = None
    ) -> Tensor:
        """Logits (R, V) behind the tokens `rows` (R,) int64.   ids, positions: (T,) int64, sequences end to end.

        adapters: (T,) int64, the number of each token's adapter; None where no token has one.
        """
        if self._latent_layers and pages.cu_seqlens is not None:
            pages = pages._replace(each_token=each_token(positions, pages.cu_seqlens, pages.block_table))
        with self._attention(), nullcontext() if adapters is None else self.adapters.applied(adapters):
            return self._forward(ids[None], positions[None], rows, pages)

    def _forward(self, ids: Tensor, positions: Tensor, rows: Tensor, pages: Pages | _Shapes) -> Tensor:
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask,
            use_cache=False,
            return_dict=True,
            logits_to_keep=rows,
            paged_step=pages,
        )
        logits: Tensor = output.logits[0]
        return logits

    @contextmanager
    def _attention(self) -> Iterator[None]:
        config = decoder_config(self.model)
        with _calling.setdefault(self.model, threading.Lock()):
            before = config._attn_implementation
            config._attn_implementation = _NAME
            try:
                with kept_latents(self._latent_layers):
                    yield
            finally:
                config._attn_implementation = before


def _checked_device(model: Any) -> torch.device:
    accepts = inspect.signature(model.forward).parameters
    missing = [name for name in _NEEDED if name not in accepts]
    config, what = decoder_config(model), type(model).__name__
    if missing or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{what} is not a decoder-only language model: its forward must take {', '.join(_NEEDED)}.")
    kinds = set(transformers_names.layer_types(config)[0])
    if not kinds <= _KINDS:
        raise InputError(f"{what} has layers of {', '.join(sorted(kinds - _KINDS))}; an engine takes {sorted(_KINDS)}.")
    if getattr(config, "num_kv_shared_layers", 0):
        raise InputError(f"{what}: its last layers read the keys of others, which an engine does not do.")
    if model.training:
        raise InputError("the model is in training mode; call model.eval() first.")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise InputError(f"all parameters must be on one real device, found {sorted(map(str, devices))}.")
    return next(iter(devices))


def _register() -> None:
    from transformers import AttentionInterface

    if _NAME not in AttentionInterface():
        AttentionInterface.register(_NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    paged_step: Pages | _Shapes | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, H, T, D)   key: (1, H_kv, T, D)   value: (1, H_kv, T, D_v).   attention_mask: not read; lengths, the
    table and windows say what a query sees.   Returns (1, T, H, D_v) and None.
    """
    refuse(kwargs)
    index: Any = module.layer_idx
    if paged_step is None:
        raise InputError(
            f"{type(module).__name__} was called without the engine's pages. While an engine computes, its model is "
            "called by it alone; or this model's layers do not hand arguments of forward to their attention."
        )
    is_latent = keeps_latents(module)
    if isinstance(paged_step, _Shapes):
        if is_latent:
            _refuse_beside_latents(module, softcap=softcap, s_aux=s_aux, sliding_window=sliding_window)
            paged_step[index] = LatentShape(key.shape[3], value.shape[3], key.dtype)
        else:
            paged_step[index] = Shape((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]), key.dtype)
        d_v: Any = module.v_head_dim if is_latent else value.shape[3]
        return query.new_zeros(1, query.shape[2], query.shape[1], d_v), None
    layer, lengths, table, cu_seqlens, _ = paged_step.layers[index], *paged_step[1:]
    if isinstance(layer, LatentLayer):
        return attend(module, query[0], key[0, 0], value[0, 0], layer, paged_step, scaling)[None], None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scales: dict[str, Any] = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    kv_append_(layer.k, layer.v, k, v, lengths, block_table=table, cu_seqlens=cu_seqlens, **scales)
    window = None if sliding_window is None else (sliding_window - 1, 0)
    options: dict[str, Any] = {"window": window, "scale": scaling, "softcap": softcap or None, "sinks": s_aux}
    options |= scales
    if cu_seqlens is None:
        o = fmha_decode(q, layer.k, layer.v, lengths, block_table=table, **options)
    else:
        o = fmha_paged(q, layer.k, layer.v, cu_seqlens, lengths, block_table=table, **options)
    assert isinstance(o, Tensor)
    return o[None], None


def _refuse_beside_latents(module: nn.Module, **options: Any) -> None:
    for name, value in options.items():
        if value:
            raise InputError(f"{type(module).__name__}: latent attention with {name} is not served by an engine.")
