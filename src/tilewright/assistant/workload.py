"""The workload: example inputs, prompts, and the calls that observation, verification and timing share.

Every stage makes the same three calls, so that what is predicted is also what is verified and timed:
`forward` (the example as given), `prefill` (the example, logits of the last token only) and `request` (prefill and
greedy decoding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.warmup.requests import is_language_model, takes

Goal = Literal["latency", "throughput"]
GOALS: tuple[Goal, ...] = ("latency", "throughput")


@dataclass(frozen=True)
class Example:
    """Arguments of one forward call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, model: nn.Module, **extra: Any) -> Any:
        """Call model(*args, **kwargs, **extra)."""
        return model(*self.args, **self.kwargs, **extra)


@dataclass(frozen=True)
class Workload:
    """Inputs and goal of one run.

    examples: the forward calls to optimise for; the first one is observed and timed.
    prompts: token ids, each (1, S) int64 on the model's device; empty for a module that is no language model.
    held_out: whether `prompts` are the user's own texts, for which perplexity means something, or only the examples.
    new_tokens: greedy tokens of one request; 0 for a module that cannot generate.
    """

    examples: tuple[Example, ...]
    prompts: tuple[Tensor, ...]
    held_out: bool
    goal: Goal
    new_tokens: int
    device: torch.device

    @property
    def generates(self) -> bool:
        """Whether requests (prefill and decoding) can be timed."""
        return self.new_tokens > 0

    @property
    def batch(self) -> int:
        """Rows of the example's token ids; 1 for a module that does not generate."""
        return int(self.input_ids.shape[0]) if self.generates else 1

    @property
    def input_ids(self) -> Tensor:
        """Token ids (B, S) of the example."""
        return self.examples[0].kwargs["input_ids"]

    def forward(self, model: nn.Module) -> Any:
        """Run the example as given."""
        return self.examples[0].run(model)

    def prefill(self, model: nn.Module) -> Any:
        """Run the example for the logits of the last token only, as `generate` does."""
        extra = {"logits_to_keep": 1} if self.generates and takes(model, "logits_to_keep") else {}
        return self.examples[0].run(model, **extra)

    def request(self, model: nn.Module, new_tokens: int | None = None) -> Tensor:
        """Run prefill and `new_tokens` greedy decoding steps; returns token ids (B, S + new_tokens)."""
        return greedy(
            model, self.input_ids, new_tokens or self.new_tokens, self.examples[0].kwargs.get("attention_mask")
        )


def workload(
    model: nn.Module,
    inputs: Any = None,
    *,
    goal: Goal = "latency",
    prompts: Sequence[str | Tensor] | None = None,
    tokenizer: Any = None,
    new_tokens: int = 32,
    batch_size: int = 8,
) -> Workload:
    """Build a Workload from what a user has at hand.

    inputs: a tensor, a tuple (positional), a mapping (keywords), or a list of those; None takes the median-length
    prompt.
    prompts: strings (need `tokenizer`) or token ids (S,) or (1, S). goal="throughput" batches `batch_size` prompts cut
    to one length.
    """
    if goal not in GOALS:
        raise InputError(f"goal={goal!r} is not known. Allowed: {', '.join(GOALS)}.")
    if model.training:
        raise InputError(
            "the model is in training mode, where outputs differ from call to call. Call model.eval() first."
        )
    device = device_of(model)
    is_language = is_language_model(model)
    tokens = _tokens(prompts, tokenizer, device, _longest(model, new_tokens)) if prompts is not None else ()
    if tokens and not is_language:
        raise InputError(
            f"prompts were given, but {type(model).__name__} is no causal language model (it has no usable generate())."
        )
    if inputs is None:
        if not tokens:
            raise InputError("neither inputs nor prompts were given: there is nothing to run.")
        examples: tuple[Example, ...] = (_from_prompts(tokens, goal, batch_size),)
    else:
        items = inputs if isinstance(inputs, list) else [inputs]
        if not items:
            raise InputError("inputs is an empty list: give at least one example.")
        examples = tuple(_example(item, device, keyword="input_ids" if is_language else None) for item in items)
    generates = is_language and "input_ids" in examples[0].kwargs
    rows = tokens or tuple(row[None] for item in examples for row in item.kwargs["input_ids"]) if generates else ()
    return Workload(examples, tuple(rows), bool(tokens), goal, new_tokens if generates else 0, device)


def greedy(model: nn.Module, input_ids: Tensor, new_tokens: int, attention_mask: Tensor | None = None) -> Tensor:
    """Decode exactly `new_tokens` greedy tokens with the model's own `generate`; end-of-text does not stop it."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    pad = getattr(model.generation_config, "pad_token_id", None)
    generate: Any = model.generate
    return generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        do_sample=False,
        num_beams=1,
        pad_token_id=0 if pad is None else pad,
    )


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter; raises InputError for a model spread over several."""
    devices = {p.device for p in model.parameters()} or {b.device for b in model.buffers()}
    if len(devices) > 1:
        raise InputError(f"the model lies on {', '.join(sorted(map(str, devices)))}; it has to lie on one device.")
    return next(iter(devices), torch.device("cpu"))


def _example(item: Any, device: torch.device, keyword: str | None) -> Example:
    if isinstance(item, Tensor):
        moved = item.to(device)
        if keyword and moved.dim() == 1:
            moved = moved[None]
        return Example((), {keyword: moved}) if keyword else Example((moved,), {})
    if isinstance(item, Mapping):
        return Example((), {key: _moved(value, device) for key, value in item.items()})
    if isinstance(item, tuple):
        if keyword and len(item) == 1:
            return _example(item[0], device, keyword)
        return Example(tuple(_moved(value, device) for value in item), {})
    raise InputError(
        f"inputs: {type(item).__name__} is not an example. Allowed: a tensor, a tuple, a mapping, or a list of those."
    )


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _longest(model: nn.Module, new_tokens: int) -> int | None:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return None if limit is None else max(int(limit) - new_tokens, 1)


def _tokens(
    prompts: Sequence[str | Tensor], tokenizer: Any, device: torch.device, longest: int | None
) -> tuple[Tensor, ...]:
    rows = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InputError("prompts are text, but no tokenizer was given. Pass tokenizer=..., or token ids.")
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            ids = prompt[None] if prompt.dim() == 1 else prompt
        if ids.shape[0] != 1:
            raise InputError(f"a prompt is one row of token ids, (S,) or (1, S); got {tuple(ids.shape)}.")
        if ids.shape[1] >= 2:  # a single token predicts nothing that could be checked
            rows.append(ids[:, :longest].to(device))
    if not rows:
        raise InputError("prompts: no prompt has two tokens or more.")
    return tuple(rows)


def _from_prompts(tokens: Sequence[Tensor], goal: Goal, batch_size: int) -> Example:
    by_length = sorted(tokens, key=lambda ids: ids.shape[1])
    median = by_length[len(by_length) // 2]
    if goal == "latency":
        return Example((), {"input_ids": median})
    length = int(median.shape[1])
    long_enough = [ids[:, :length] for ids in tokens if ids.shape[1] >= length]
    rows = [long_enough[index % len(long_enough)] for index in range(batch_size)]
    return Example((), {"input_ids": torch.cat(rows)})
