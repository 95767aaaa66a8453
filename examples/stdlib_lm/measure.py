"""Perplexity over every window of a token stream, in nats, per token and per byte.

The stream is cut into windows of the model's full context, one after another; every token but the very first is
predicted exactly once, from at most `context` tokens before it. Tokens at the start of a window see little of what came
before, so the number is an upper bound.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        tokens: Predicted tokens, the end-of-file marks among them.
        nats_per_token: Mean negative log likelihood.
        perplexity: exp of that.
        bits_per_byte: All bits spent, over the bytes of the text: comparable between tokenizers.
    """

    tokens: int
    nats_per_token: float
    perplexity: float
    bits_per_byte: float


@torch.inference_mode()
def perplexity(model: nn.Module, stream: torch.Tensor, *, text_bytes: int, context: int, batch: int) -> Perplexity:
    """Measure `model` on `stream` in the model's own dtype.

    Args:
        model: A causal language model of transformers; put back into the mode it came in.
        stream: (tokens,) int64 on the model's device, at least two tokens.
        text_bytes: UTF-8 bytes that the stream encodes.
        context: Tokens a window holds.
        batch: Windows a forward pass takes.
    """
    predicted = stream.numel() - 1
    if predicted < 1:
        raise ValueError(f"perplexity needs at least 2 tokens, got {stream.numel()}")
    was_training = model.training
    model.eval()
    full = predicted // context
    inputs = stream[: full * context].view(full, context)
    targets = stream[1 : full * context + 1].view(full, context)
    pairs = list(zip(inputs.split(batch), targets.split(batch), strict=True)) if full else []
    if predicted % context:
        pairs.append((stream[None, full * context : -1], stream[None, full * context + 1 :]))
    nats = torch.zeros((), dtype=torch.float64, device=stream.device)
    for window, target in pairs:
        logits = model(input_ids=window, use_cache=False).logits  # (batch, context, V)
        nats += F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="sum")
    model.train(was_training)
    total = float(nats)
    return Perplexity(predicted, total / predicted, math.exp(total / predicted), total / math.log(2) / text_bytes)
