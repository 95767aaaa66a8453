"""What accuracy is judged on: a sample of prompts and positions, and the outputs of a model at these."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.assistant.workload import Workload, greedy
from tilewright.models.agreement import logits_of

_KEPT_BYTES = 1 << 30  # logits kept for comparison, at most
_DECODED_PROMPTS = 4  # prompts whose greedy continuation is checked, at most


@dataclass(frozen=True)
class Evaluation:
    """Outputs of one model on the workload's prompts (on its examples, for a module that is no language model).

    logits: (N, V) at the sampled positions. nll: (T,) float64, negative log-likelihood of each next token; None without
    prompts.
    generated: number of greedily decoded tokens; 0 for a model that does not generate. agreed: how many of them a
    forward pass of the same model over the whole text ranks first.
    """

    logits: Tensor
    nll: Tensor | None
    generated: int = 0
    agreed: int = 0


@dataclass(frozen=True)
class Sample:
    """Prompts to evaluate, and the positions in each (int64); drawn once, so that all models are judged on the same.

    decoded: number of prompts whose greedy continuation is checked.
    """

    prompts: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    decoded: int = _DECODED_PROMPTS


def draw(
    work: Workload, vocabulary: int, *, seed: int, prompts: int | None = None, decoded: int = _DECODED_PROMPTS
) -> Sample:
    """Choose random positions in the first `prompts` prompts: at most 4096, and 1 GiB of float64 logits."""
    chosen = work.prompts[:prompts]
    lengths = [int(ids.shape[1]) for ids in chosen]
    total = sum(lengths)
    count = min(total, 4096, max(1, _KEPT_BYTES // (8 * vocabulary)))
    picks = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    positions, start = [], 0
    for length in lengths:
        positions.append(picks[(picks >= start) & (picks < start + length)] - start)
        start += length
    return Sample(chosen, tuple(positions), min(decoded, _DECODED_PROMPTS))


def evaluate(model: nn.Module, work: Workload, sample: Sample | None, *, decode: bool) -> Evaluation:
    """Run `model` on the sample, or on the workload's examples if it is None. decode: also check greedy decoding."""
    with torch.no_grad():
        if sample is None:
            outputs = [logits_of(example.run(model)).detach() for example in work.examples]
            return Evaluation(
                torch.cat([out.reshape(-1, out.shape[-1]) if out.dim() else out.reshape(1, 1) for out in outputs]), None
            )
        chosen, losses = [], []
        for ids, positions in zip(sample.prompts, sample.positions, strict=True):
            logits = logits_of(model(input_ids=ids))[0]
            chosen.append(logits[positions.to(logits.device)])
            losses.append(
                F.cross_entropy(
                    logits[:-1].to(_at_least_float(logits.dtype)), ids[0, 1:].to(logits.device), reduction="none"
                )
                .double()
                .cpu()
            )
        generated = agreed = 0
        if decode and work.generates:
            generated, agreed = _decoding_agreement(model, work, sample.prompts[: sample.decoded])
        return Evaluation(torch.cat(chosen), torch.cat(losses) if work.held_out else None, generated, agreed)


def perplexity(nll: Tensor) -> float:
    """exp of the mean negative log-likelihood."""
    return math.exp(float(nll.mean()))


def _decoding_agreement(model: nn.Module, work: Workload, prompts: tuple[Tensor, ...]) -> tuple[int, int]:
    """Count the tokens that `generate` chose, and how many of them a forward pass over the whole text ranks first.

    The logits of the forward pass are compared with the reference. Decoding may run other code, such as a static KV
    cache; this count shows whether it agrees with the forward pass.
    """
    generated = agreed = 0
    for ids in prompts:
        rows = ids.expand(work.batch, -1)  # the batch size decoding is prepared for
        text = greedy(model, rows, work.new_tokens)[:1]
        ranked_first = logits_of(model(input_ids=text))[0, ids.shape[1] - 1 : -1].argmax(-1)
        generated += work.new_tokens
        agreed += int((ranked_first == text[0, ids.shape[1] :]).sum())
    return generated, agreed


def _at_least_float(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
