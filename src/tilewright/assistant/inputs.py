"""Inputs for a model for which the user gave none: built-in texts or random numbers, as its forward requires."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.errors import UsageError
from tilewright.warmup.requests import is_language_model

TOKENS, ROWS, SAMPLES = 64, 4, 16_000

TEXTS = (
    "A compiler reads the whole program before it writes the first instruction. What it learns on the way, which "
    "values are constant, which loops never overlap, decides how fast the result will run on the machine that it "
    "is made for.",
    "The harbour was quiet in the morning. Two boats lay at the pier, a red one and a white one, and an old man "
    "was painting the name of his daughter on the bow of the smaller. He had all day, and he took his time with "
    "each letter.",
    "To make a simple bread, mix five hundred grams of flour with three hundred and fifty of water, ten of salt "
    "and a little yeast. Let it rest for twelve hours, fold it twice, and bake it in a hot oven until the crust "
    "is dark brown.",
    "In the experiment, each of the twelve groups measured the period of a pendulum ten times. The mean agreed "
    "with the theory within one percent, but the spread was larger than expected, because the string stretched "
    "under the weight.",
    "Question: how many days are there between the third of March and the first of May? Answer: March has thirty-"
    "one days, so there are twenty-eight left after the third, then thirty in April, and one more until the first"
    " of May.",
    "def mean(values):\n"
    "    total = 0.0\n"
    "    for value in values:\n"
    "        total += value\n"
    "    return total / len(values)\n"
    "\n"
    "\n"
    "def variance(values):\n"
    "    centre = mean(values)\n"
    "    return mean([(value - centre) ** 2 for value in values])\n",
)


@dataclass(frozen=True)
class Made:
    """Prompts or inputs for `optimize`, and one sentence that says where they come from."""

    note: str
    prompts: list[str] | list[Tensor] | None = None
    inputs: Any = None


def make(model: nn.Module, tokenizer: Any = None) -> Made:
    """Make inputs for a transformers model; the argument names of its forward say which kind it needs.

    A language model gets prompts, another text model token ids (4, 64), an image model pixels of the size in its
    configuration, an audio model one second at 16 kHz or one spectrogram. For any other model, raises UsageError, which
    says what to pass.
    """
    parameters = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    if is_language_model(model):
        if tokenizer is not None:
            return Made(f"No prompts were given: {len(TEXTS)} texts of tilewright's own were used.", list(TEXTS))
        rows = list(_random_tokens(config))
        return Made(f"No prompts were given and there is no tokenizer: {ROWS} rows of random tokens were used.", rows)
    has_decoder = getattr(config, "is_encoder_decoder", False)
    if "input_ids" in parameters and "pixel_values" not in parameters and hasattr(config, "vocab_size"):
        inputs, note = _text(config, tokenizer)
        if has_decoder:
            start = getattr(config, "decoder_start_token_id", None) or 0
            inputs["decoder_input_ids"] = torch.full((ROWS, 1), start)
        return Made(note, inputs=inputs)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if "pixel_values" in parameters and "input_ids" not in parameters and size is not None:
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return Made(
            "No inputs were given: random pixels were used.",
            inputs={"pixel_values": _random(1, channels, height, width)},
        )
    if "input_values" in parameters and not has_decoder:
        return Made("No inputs were given: one second of noise was used.", inputs={"input_values": _random(1, SAMPLES)})
    if {"input_features", "decoder_input_ids"} <= parameters.keys() and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        start = torch.full((1, 1), getattr(config, "decoder_start_token_id", None) or 0)
        inputs = {"input_features": _random(1, config.num_mel_bins, frames), "decoder_input_ids": start}
        return Made("No inputs were given: random spectrograms were used.", inputs=inputs)
    raise UsageError(
        f"{type(model).__name__} came without inputs, and none can be made for it: its forward takes "
        f"{', '.join(list(parameters)[:4])}. Give MODEL as FILE.py:FACTORY, a function that returns (module, inputs)."
    )


def _text(config: Any, tokenizer: Any) -> tuple[dict[str, Tensor], str]:
    if tokenizer is None:
        ids = torch.cat(list(_random_tokens(config)))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
        }, "No inputs were given: random tokens were used."
    rows = [tokenizer(text)["input_ids"][:TOKENS] for text in TEXTS[:ROWS]]
    length = min(map(len, rows))
    ids = torch.tensor([row[:length] for row in rows])
    note = f"No inputs were given: {ROWS} texts of tilewright's own were used."
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, note


def _random_tokens(config: Any) -> tuple[Tensor, ...]:
    """ROWS tensors (1, S) of token ids, within the model's vocabulary and positions."""
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randint(0, config.vocab_size, (1, max(length // 2, 2)), generator=generator) for _ in range(ROWS)
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
