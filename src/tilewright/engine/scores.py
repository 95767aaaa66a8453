"""Log-probabilities beside those of drawn tokens: of the prompt's own tokens, and of the likeliest alternatives.

The scored rows of a step are logits behind some of its tokens: those whose next token is known and wanted (a target),
and those that draw.  They cost logits, so the scheduler gives a step few of prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from tilewright.engine.scheduler import Chunk
from tilewright.engine.sequence import Score

_BLOCK = 256  # rows whose logits are in float32 at a time


@dataclass(frozen=True)
class Rows:
    """rows: of the step's packed tokens.   targets: a token each.   top: number of alternatives."""

    rows: list[int]
    targets: list[int]
    top: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "Rows | None":
        """What a step has to score; None for nothing."""
        rows: list[int] = []
        targets: list[int] = []
        top = start = 0
        for chunk in chunks:
            rows += range(start, start + chunk.scored)
            targets += chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.scored + 1]
            if chunk.shows_top:
                rows.append(start + chunk.count - 1)
                targets.append(0)  # drawn on the device, which says its log-probability itself
            start += chunk.count + len(chunk.drafts)
            if chunk.scored or chunk.shows_top:
                top = max(top, chunk.sequence.params.top_logprobs)
        return cls(rows, targets, top) if rows else None


def score(logits: Tensor, targets: Tensor, top: int) -> Tensor:
    """(R, 1 + 2 * top) float64, which holds tokens exactly: the target's log-probability, those of the likeliest
    tokens, and these tokens.

    logits: (R, V)   targets: (R,) int64.   The softmax is computed in float32.
    """
    top = min(top, logits.shape[1])
    parts: list[Tensor] = []
    for block, its in zip(logits.split(_BLOCK), targets.split(_BLOCK), strict=True):
        logprobs = torch.log_softmax(block.float(), dim=-1)
        values, tokens = logprobs.topk(top)
        parts.append(torch.cat([x.double() for x in (logprobs.gather(1, its[:, None]), values, tokens)], dim=1))
    return torch.cat(parts)


def scores(chunks: Sequence[Chunk], scored: Tensor | None) -> list[list[Score]]:
    """Scores of each chunk: those of its prompt tokens in order, then that of its draw if it shows alternatives."""
    if scored is None:
        return [[] for _ in chunks]
    every = _each(scored.tolist())
    return [[_first(each, chunk) for each in islice(every, chunk.scored + chunk.shows_top)] for chunk in chunks]


def _each(rows: list[list[float]]) -> Iterator[Score]:
    for logprob, *rest in rows:
        top = len(rest) // 2
        yield Score(logprob, dict(zip(map(int, rest[top:]), rest[:top], strict=True)))


def _first(score: Score, chunk: Chunk) -> Score:
    """A score with as many alternatives as the request of `chunk` asks for."""
    return Score(score.logprob, dict(islice(score.top.items(), chunk.sequence.params.top_logprobs)))
