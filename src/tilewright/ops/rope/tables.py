"""Tables of cosines and sines for `ops.apply_rope`: the frequencies of every `rope_type` of Hugging Face's models.

Pair i of a head rotates by the angle position * f_i.  Without scaling f_i = base^(-2i/dim): from one radian a token to
one radian in `base` tokens.  A longer context than in training needs lower frequencies; the types differ in which pairs
they scale.  Types and parameters have the names of `config.rope_parameters`, and the results equal Hugging Face's bit
for bit.  Each type is a function that returns (frequencies, attention_factor): float32 (dim/2,), and the factor on cos
and sin.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError

Frequencies = tuple[Tensor, float]


@dataclass(frozen=True)
class RopeConfig:
    """The part of a model's configuration that `rope_table` reads; a Hugging Face config has the same names.

    RopeConfig(128, 8192, {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5})
    """

    head_dim: int
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]


def rope_table(
    config: Any,
    *,
    length: int | None = None,
    layer_type: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of positions 0 to length - 1, each (length, R); columns R/2 to R repeat columns 0 to R/2.

    config      a `RopeConfig` or a Hugging Face config
    length      default: config.max_position_embeddings; "dynamic" and "longrope" choose their frequencies by it
    layer_type  for configs that hold one set of rope_parameters for each type of layer (Gemma 3)
    Computed on the CPU in float32, then rounded to dtype.  Raises InputError as `frequencies` does.
    """
    length = config.max_position_embeddings if length is None else length
    inv_freq, attention_factor = frequencies(config, length=length, layer_type=layer_type)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = ((t * attention_factor).to(device=device, dtype=dtype) for t in (angles.cos(), angles.sin()))
    return cos, sin


def frequencies(config: Any, *, length: int | None = None, layer_type: str | None = None) -> Frequencies:
    """(frequencies, attention_factor) of a model, for sequences of `length` tokens; default: the trained length.

    Raises InputError for a rope_type that does not exist, or that lacks a parameter.
    """
    rope_parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = rope_parameters.get("rope_type", "default")
    if kind not in TYPES:
        raise InputError(f"rope_table: rope_type is {kind!r}; needs one of {', '.join(TYPES)}.")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "base": 10_000.0,
        **{
            ("base" if name == "rope_theta" else name): value
            for name, value in rope_parameters.items()
            if value is not None
        },
        "head_dim": head_dim,
        "dim": int(head_dim * (rope_parameters.get("partial_rotary_factor") or 1.0)),
        "max_position_embeddings": config.max_position_embeddings,
        "length": length,
    }
    parameters = inspect.signature(TYPES[kind]).parameters
    missing = [n for n, p in parameters.items() if n not in values and p.default is p.empty]
    if missing:
        raise InputError(
            f"rope_table: rope_type {kind!r} needs {', '.join(missing)} in rope_parameters; "
            f"given {dict(rope_parameters)}."
        )
    return TYPES[kind](**{name: values[name] for name in parameters if name in values})


def inverse_frequencies(dim: int, base: float = 10_000.0) -> Tensor:
    """base^(-2i/dim) for i below dim/2: radians a token of each pair, without scaling."""
    return 1.0 / _wavelengths(dim, base)


def _wavelengths(dim: int, base: float) -> Tensor:
    """base^(2i/dim): tokens a radian."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim)


def default(dim: int, base: float) -> Frequencies:
    """No scaling."""
    return inverse_frequencies(dim, base), 1.0


def linear(dim: int, base: float, factor: float) -> Frequencies:
    """Position interpolation: every frequency divided by `factor`.  Chen et al., 2023 (and kaiokendev)."""
    return inverse_frequencies(dim, base) / factor, 1.0


def dynamic(
    dim: int, base: float, factor: float, max_position_embeddings: int, length: int | None = None
) -> Frequencies:
    """Dynamic NTK: a larger base once `length` exceeds max_position_embeddings; the highest frequency stays.

    bloc97 and emozilla, 2023.
    """
    stretch = max(length or 0, max_position_embeddings) * factor / max_position_embeddings - (factor - 1)
    return inverse_frequencies(dim, base * stretch ** (dim / (dim - 2))), 1.0


def proportional(head_dim: int, base: float, factor: float = 1.0, partial_rotary_factor: float = 1.0) -> Frequencies:
    """Only the pairs of highest frequency rotate; the others have frequency 0 (Gemma 4)."""
    rotating_pairs = int(partial_rotary_factor * head_dim // 2)
    inv_freq = inverse_frequencies(head_dim, base)
    inv_freq[rotating_pairs:] = 0.0
    return inv_freq / factor, 1.0


def yarn(
    dim: int,
    base: float,
    original_max_position_embeddings: int,
    max_position_embeddings: int,
    factor: float | None = None,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Frequencies:
    """NTK by parts: pairs with over `beta_fast` rotations in training stay, those under `beta_slow` are scaled.

    A ramp interpolates between them, and a factor on cos and sin sharpens attention.  Peng et al., "YaRN", 2023.
    """
    factor = factor or max_position_embeddings / original_max_position_embeddings
    if attention_factor is None:
        attention_factor = _temperature(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)

    def pair_with_rotations(rotations: float) -> float:
        tokens_a_radian = original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(tokens_a_radian) / (2 * math.log(base))

    low, high = pair_with_rotations(beta_fast), pair_with_rotations(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    unscaled = 1 - ramp
    wavelengths = _wavelengths(dim, base)
    return (1.0 / (factor * wavelengths)) * (1 - unscaled) + (1.0 / wavelengths) * unscaled, attention_factor


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope(
    dim: int,
    base: float,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    max_position_embeddings: int,
    factor: float | None = None,
    attention_factor: float | None = None,
    length: int | None = None,
) -> Frequencies:
    """A searched factor for each pair: one set up to the trained length, one beyond.  Ding et al., 2024."""
    factor = factor or max_position_embeddings / original_max_position_embeddings
    if attention_factor is None:
        gain = math.log(factor) / math.log(original_max_position_embeddings) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + gain)
    beyond = length is not None and length > original_max_position_embeddings
    factors = torch.tensor(long_factor if beyond else short_factor, dtype=torch.float32)
    return 1.0 / (factors * _wavelengths(dim, base)), attention_factor


def llama3(
    dim: int,
    base: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Frequencies:
    """By parts: pairs with over `high_freq_factor` rotations in training stay, under `low_freq_factor` are scaled.

    In between the two are blended.  Grattafiori et al., "The Llama 3 Herd of Models", 2024.
    """
    inv_freq = inverse_frequencies(dim, base)
    wavelength = 2 * math.pi / inv_freq
    slow = wavelength > original_max_position_embeddings / low_freq_factor
    fast = wavelength < original_max_position_embeddings / high_freq_factor
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    return torch.where(slow, inv_freq / factor, torch.where(fast, inv_freq, blended)), 1.0


TYPES: dict[str, Callable[..., Frequencies]] = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": proportional,
}
