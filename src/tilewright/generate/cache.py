"""A static KV cache for Hugging Face models, made for a captured decode step.

Transformers' own `StaticLayer` keeps a length per layer and computes its write index in every layer (arange, add,
add_: three launches a layer), and its sliding-window form branches on a Python counter and rolls the whole window for
each token, which a CUDA graph cannot replay. Here every layer shares one `Cursor`, and a sliding-window layer is a
ring: position p lives in slot p % capacity, whichever lap it is on.

Positions count in one of two ways. For attention with a mask, all rows share them, padding included, and a step writes
with two `index_copy_` a layer. For `fmha_decode`, which takes a length for each row and no mask, those of a row begin
at its first real token: padding is not stored, keys lie in slots 0 .. length - 1, and a step writes with `kv_append_`.
A ring then has exactly the slots of its window, so that a query sees all that it holds, in whatever order.
"""

from typing import Any

import torch

from tilewright.errors import InputError
from tilewright.models.transformers_names import cache_bases, layer_types
from tilewright.ops.kvcache.kv_append_ import kv_append_

Cache, CacheLayerMixin = cache_bases()

SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
_RING_MULTIPLE = 64  # a ring under a mask is rounded up to whole tiles


class Cursor:
    """The position of decoding. All layers of a cache share it; its tensors stay at one address on the device.

    position   (1,) int64   absolute position of the token the next decode step reads; a graph advances it
    first      (B,) int64   position of each row's first real token: the number of left-padding tokens
    prefilling              host flag: `update` takes a whole prompt instead of one token
    padded                  host flag: some row of the prompt has padding
    visible                 number of slots that attention reads in a decode step; constant within one captured graph

    `locate` fills the others once a step:
    ring_slot     (1,) int64   position % ring, where rows share positions
    lengths       (B,) int32   tokens of each row, the one of this step included, where each row has its own
    ring_lengths  (B,) int32   how many of them a ring holds
    ring_ends     (B,) int32   one more than the slot of the newest one in a ring
    """

    def __init__(self, batch_size: int, ring: int | None, device: torch.device, by_row: bool = False) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.first = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.ring_slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.ring_lengths, self.ring_ends = torch.zeros_like(self.lengths), torch.zeros_like(self.lengths)
        self.ring, self.by_row = ring, by_row
        self.prefilling, self.padded = True, False
        self.visible = 0

    def locate(self) -> None:
        """Compute the slots of the current position; the first thing a decode step does."""
        if self.by_row:
            self.lengths.copy_(self.position + 1 - self.first)
            if self.ring is not None:
                torch.clamp(self.lengths, max=self.ring, out=self.ring_lengths)
                self.ring_ends.copy_((self.lengths - 1).remainder_(self.ring).add_(1))
        elif self.ring is not None:
            torch.remainder(self.position, self.ring, out=self.ring_slot)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc, valid-type]  # transformers is not typed
    """Keys and values of one layer: (B, H_kv, capacity, D), allocated on first use, then written in place."""

    is_compileable = True
    supports_early_init = False
    keys: Any  # None before the first prompt
    values: Any

    def __init__(self, cursor: Cursor, capacity: int, window: int | None = None) -> None:
        super().__init__()
        self.cursor = cursor
        self.capacity = capacity
        self.window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeros: attention multiplies a masked slot by a zero weight, so its value must not be NaN."""
        batch, heads = key_states.shape[:2]
        # Under autocast rotary embeddings leave keys in float32; `fmha_decode` takes one dtype
        like = value_states if self.cursor.by_row else key_states
        self.keys = like.new_zeros(batch, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, H_kv, S, D) states. Returns the keys and values to attend to: prompt or visible slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cursor.prefilling:
            self._store_prompt(key_states, value_states)
            return key_states, value_states
        if self.cursor.by_row:
            ends = self.cursor.lengths if self.capacity != self.cursor.ring else self.cursor.ring_ends
            new = key_states[:, :, 0].to(self.keys.dtype), value_states[:, :, 0]
            kv_append_(self.keys.transpose(1, 2), self.values.transpose(1, 2), *new, ends)
            return self.keys, self.values
        slot = self.cursor.position if self.capacity != self.cursor.ring else self.cursor.ring_slot
        self.keys.index_copy_(2, slot, key_states)
        self.values.index_copy_(2, slot, value_states)
        visible = min(self.cursor.visible, self.capacity)
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def _store_prompt(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        length = key_states.shape[2]
        if self.cursor.by_row and self.cursor.padded:
            self._store_padded(key_states, value_states)
            return
        if length <= self.capacity:
            self.keys[:, :, :length].copy_(key_states)
            self.values[:, :, :length].copy_(value_states)
            return
        # Only the last `capacity` tokens are in a future window.
        positions = torch.arange(length - self.capacity, length, device=key_states.device)
        slots = positions.remainder_(self.capacity)
        self.keys.index_copy_(2, slots, key_states[:, :, -self.capacity :])
        self.values.index_copy_(2, slots, value_states[:, :, -self.capacity :])

    def _store_padded(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Each row from its first token on; padding, at negative positions, goes to slots that are written again before
        they are read.
        """
        length = key_states.shape[2]
        stored = min(length, self.capacity)
        positions = torch.arange(length - stored, length, device=key_states.device) - self.cursor.first[:, None]
        slots = positions.remainder_(self.capacity)[:, None, :, None]  # (B, 1, stored, 1)
        for cache, states in ((self.keys, key_states), (self.values, value_states)):
            last = states[:, :, -stored:].to(cache.dtype)
            cache.scatter_(2, slots.expand_as(last), last)

    def release(self) -> None:
        """Free the storage; the next prompt allocates it in its own dtype and on its device."""
        self.keys = self.values = None
        self.is_initialized = False

    def clear(self) -> None:
        """Zero the last sequence: attention that reads masked slots would leak its NaNs into the next sequence."""
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys a prefill attends to. Decode steps have their own mask and do not call it."""
        return (query_length, 0) if self.cursor.prefilling else (min(self.cursor.visible, self.capacity), 0)

    def get_seq_length(self) -> Any:
        """Tokens stored so far: 0 while a prompt is read, else a device scalar, which needs no synchronisation."""
        return 0 if self.cursor.prefilling else self.cursor.position[0]

    def get_max_length(self) -> int:
        """Slots of this layer."""
        return self.capacity


class SlotCache(Cache):  # type: ignore[misc, valid-type]
    """`SlotLayer`s for every layer of a model, full or sliding by its config.

    max_length: positions of a full-attention layer, prompt and new tokens together. Sliding layers keep one window,
    under a mask rounded up to 64 slots. by_row: each row has its own positions, for `fmha_decode`. Raises InputError
    for layers that are neither (chunked, linear, compressed): their state is not a list of keys and values by position.
    """

    def __init__(
        self, config: Any, *, max_length: int, batch_size: int, device: torch.device, by_row: bool = False
    ) -> None:
        kinds, windows = layer_types(config.get_text_config(decoder=True))
        unknown = sorted(set(kinds) - set(SUPPORTED_LAYERS))
        if unknown:
            raise InputError(
                f"{type(config).__name__} has layers of type {', '.join(unknown)}; a static decoder handles "
                f"{' and '.join(SUPPORTED_LAYERS)}. Use model.generate() for this model."
            )
        distinct_windows = sorted({window for window in windows if window is not None})
        if len(distinct_windows) > 1:
            raise InputError(
                f"{type(config).__name__} has layers with windows of {' and '.join(map(str, distinct_windows))} "
                "tokens; a static decoder handles one. Use model.generate() for this model."
            )
        window = distinct_windows[0] if distinct_windows else None
        multiple = 1 if by_row else _RING_MULTIPLE
        ring = -(-window // multiple) * multiple if window is not None else max_length
        self.cursor = Cursor(batch_size, ring if ring < max_length else None, device, by_row)
        super().__init__(
            layers=[
                SlotLayer(self.cursor, min(ring, max_length), window)
                if kind == "sliding_attention"
                else SlotLayer(self.cursor, max_length)
                for kind in kinds
            ]
        )
        self.window = window
        self.max_length = max_length

    def clear(self) -> None:
        """Zero every layer."""
        for layer in self.layers:
            layer.clear()

    def release(self) -> None:
        """Free every layer's storage."""
        for layer in self.layers:
            layer.release()

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values; 0 before the first forward."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)
