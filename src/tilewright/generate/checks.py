"""Checks of a model and of a call, before a static decoder allocates or launches anything."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.errors import InputError
from tilewright.nn.weight_casts import WeightCasts

_NEEDED = ("input_ids", "position_ids", "past_key_values")


def device_of(model: Any) -> torch.device:
    """The device of a model that can be decoded. InputError says which part of the contract is missing."""
    accepts = inspect.signature(model.forward).parameters
    missing = [name for name in _NEEDED if name not in accepts]
    if missing or model.get_output_embeddings() is None or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} is not a decoder-only language model: its forward must take {', '.join(_NEEDED)}, "
            "and it must have a language-model head"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise InputError(f"all parameters must be on one real device, found {sorted(map(str, devices))}")
    return next(iter(devices))


def prompt_length(input_ids: torch.Tensor, new_tokens: int, *, batch: int, room: int, device: torch.device) -> int:
    """S of a prompt (B, S). Raises InputError unless it fits into `room` positions with its new tokens."""
    if input_ids.ndim != 2 or input_ids.shape[0] != batch or input_ids.shape[1] < 1:
        raise InputError(
            f"input_ids has shape {tuple(input_ids.shape)}; this decoder takes ({batch}, S) with S >= 1. "
            "Make another with StaticDecoder(model, batch_size=...)."
        )
    if input_ids.device != device:
        raise InputError(f"input_ids are on {input_ids.device}, the model on {device}")
    length = input_ids.shape[1]
    if length + new_tokens > room:
        raise InputError(
            f"{length} prompt tokens and {new_tokens} new ones exceed max_length={room}. "
            f"Make a decoder with max_length >= {length + new_tokens}."
        )
    return length


def special_tokens(
    generation_config: Any, eos: int | Sequence[int] | None, pad: int | None
) -> tuple[tuple[int, ...], int]:
    """(end-of-text tokens, padding token) of the call, else of the model's generation config."""
    if eos is None:
        eos = generation_config.eos_token_id
    if pad is None:
        pad = generation_config.pad_token_id
    stops = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return stops, pad if pad is not None else stops[0] if stops else 0


def fingerprint(model: Any) -> tuple[object, ...]:
    """A value that changes when the model's modules change class or its tensors and float8 copies move: a captured
    graph is then out of date.
    """
    modules = list(model.modules())
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    casts = [value for m in modules for value in vars(m).values() if isinstance(value, WeightCasts)]
    return (*map(type, modules), *(t.data_ptr() for t in tensors), *(a for c in casts for a in c.addresses()))
