"""Tables of cosines and sines for `ops.apply_rope`: the frequencies of every `rope_type` that Hugging Face models use.

Pair i of a head turns by the angle position * f_i, plainly f_i = base^(-2i/dim): from one radian a token down to one in
`base` tokens.  A model that shall read further than it was trained slows its turning down; the types differ in which pairs.
Names are those of `config.rope_parameters`, results those of Hugging Face bit for bit.  Every type's function gives
(frequencies, attention_factor): float32 (dim/2,), and the number that cos and sin are multiplied by.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.errors import InputError

Frequencies = tuple[Tensor, float]


class Config(Protocol):
    """What is read of a model's configuration; a Hugging Face config is one."""

    @property
    def rope_parameters(self) -> Mapping[str, Any]: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True)
class RopeConfig:
    """The same without a Hugging Face config: `RopeConfig(128, 8192, {"rope_type": "default", "rope_theta": 5e5})`."""

    head_dim: int
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]


def rope_table(
    config: Config,
    *,
    length: int | None = None,
    layer_type: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of positions 0 to `length` - 1, each (length, R); columns R/2 to R repeat columns 0 to R/2.

    length      default: config.max_position_embeddings.  "dynamic" and "longrope" choose their frequencies by it.
    layer_type  for configs whose rope_parameters are a dict of such dicts by layer type (Gemma 3)
    Computed in float32 and rounded once to dtype.  Raises InputError for an unknown rope_type or a parameter that lacks.
    """
    length = config.max_position_embeddings if length is None else length
    turns, attention_factor = frequencies(config, length=length, layer_type=layer_type)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), turns)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = ((t * attention_factor).to(device=device, dtype=dtype) for t in (angles.cos(), angles.sin()))
    return cos, sin


def frequencies(config: Config, *, length: int | None = None, layer_type: str | None = None) -> Frequencies:
    """(frequencies, attention_factor) for sequences of `length` tokens; default: those the model was made for."""
    given = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = given.get("rope_type", "default")
    if kind not in _TYPES:
        raise InputError(f"rope_table: rope_type is {kind!r}; needs one of {', '.join(_TYPES)}.")
    function, names = _TYPES[kind]
    head_dim, base = _head_dim(config), given.get("rope_theta", 10_000.0)
    context = {
        "head_dim": head_dim,
        "dim": int(head_dim * (given.get("partial_rotary_factor") or 1.0)),
        "base": base,
        "max_position_embeddings": config.max_position_embeddings,
        "length": length,
    }
    arguments = {name: value for name, value in {**given, **context}.items() if name in names and value is not None}
    try:
        return function(**arguments)
    except TypeError as error:
        raise InputError(f"rope_table: rope_type {kind!r} with {sorted(given)}: {error}.") from None


def _head_dim(config: Any) -> int:
    found = getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)
