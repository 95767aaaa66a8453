"""Penalties and biases of requests: what `ops.apply_penalties` reads, one row for each slot, on the device.

A row is written before the first draw of an admission, when the host has read all tokens of the sequence; from there
the device counts those that it draws, so the host may be one step behind.  Behind a draft, the drafts up to it count
too; of the draws of a step, those count before which every draft is what was drawn in its place.  Requests that change
no logits use the spare row, and penalties that are neutral.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.engine.inputs import StepInputs
from tilewright.engine.scheduler import Chunk
from tilewright.engine.sequence import Sequence
from tilewright.ops.sampling.apply_penalties import apply_penalties


class Drafts(NamedTuple):
    """Drafts of a step, whose rows are those of one sequence after another.   tokens: (R,) behind which a row's logits
    are.   numbers: (R,) which draft that is, or 0.   most: drafts of one sequence.
    """

    tokens: Tensor
    numbers: Tensor
    most: int

    def before(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each row's draft, then the one before it, and so on: tokens (R,), and a mask (R,) of those there are."""
        for back in range(self.most):
            yield self.tokens.roll(back), self.numbers > back

    def accepted(self, drawn: Tensor) -> Tensor:
        """(R,) bool: before these draws every draft is what was drawn in its place.   drawn: (R,)."""
        is_right = drawn.roll(1) == self.tokens
        accepted = torch.ones_like(is_right)
        for back in range(self.most):
            accepted &= is_right.roll(back) | (self.numbers <= back)
        return accepted


class Penalties:
    """counts: (max_batch + 1, V) int32, tokens drawn so far.   prompt: bool, tokens of the prompt.   bias: float32."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._counts = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self._bias = torch.zeros(rows, vocabulary, dtype=torch.float32, device=device)
        self._ones = torch.ones((), dtype=torch.int32, device=device)
        self._holders: list[tuple[Sequence, int] | None] = [None] * rows
        self._forbids = [False] * rows  # the stop tokens of the holder

    def prepare(self, chunks: Sequences[Chunk]) -> None:
        """Queue the rows of sequences that have a new slot, or that may end from this step on."""
        for chunk in chunks:
            sequence = chunk.sequence
            if not chunk.draws or not sequence.params.changes_logits:
                continue
            slot, holder = sequence.slot, (sequence, sequence.admissions)
            forbids = chunk.end - sequence.prompt_length < sequence.params.min_tokens
            is_new = self._holders[slot] != holder
            if is_new:
                self._count(slot, sequence)
            if is_new or forbids != self._forbids[slot]:
                self._add_bias(slot, sequence, forbids)
            self._holders[slot], self._forbids[slot] = holder, forbids

    def apply(self, logits: Tensor, inputs: StepInputs, before: Iterable[tuple[Tensor, Tensor]] = ()) -> Tensor:
        """logits (R, V), of the rows of a step, after penalties and bias.

        before: further tokens of each row that count, (R,), and a mask of rows that have one.
        """
        count = logits.shape[0]
        slots = inputs.device("penalty_slots", count)
        counts = self._counts[slots]
        for tokens, mask in before:
            counts.scatter_add_(1, tokens[:, None], mask[:, None].to(torch.int32))
        return apply_penalties(
            logits,
            counts,
            prompt=self._prompt[slots],
            bias=self._bias[slots],
            repetition=inputs.device("repetition_penalty", count),
            presence=inputs.device("presence_penalty", count),
            frequency=inputs.device("frequency_penalty", count),
        )

    def add(self, tokens: Tensor, inputs: StepInputs, accepted: Tensor) -> None:
        """Count tokens (R,) that were drawn, where they are `accepted` (R,)."""
        places = inputs.device("penalty_slots", tokens.shape[0]) * self._counts.shape[1] + tokens
        self._counts.view(-1).scatter_add_(0, places, accepted.to(torch.int32))

    def _count(self, slot: int, sequence: Sequence) -> None:
        self._counts[slot].zero_()
        self._prompt[slot].zero_()
        vocabulary = self._counts.shape[1]  # of logits: embeddings may have more rows
        prompt = self._on_device([token for token in sequence.tokens[: sequence.prompt_length] if token < vocabulary])
        output = self._on_device(sequence.new_tokens)
        self._prompt[slot].index_fill_(0, prompt, True)
        self._counts[slot].scatter_add_(0, output, self._ones.expand(output.shape))

    def _add_bias(self, slot: int, sequence: Sequence, forbids: bool) -> None:
        bias = dict(sequence.params.logit_bias)
        if forbids:
            bias |= {token: float("-inf") for token in sequence.stops if 0 <= token < self._bias.shape[1]}
        self._bias[slot].zero_()
        self._bias[slot].index_copy_(
            0, self._on_device(list(bias)), self._on_device(list(bias.values()), torch.float32)
        )

    def _on_device(self, values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """A copy that the host does not wait for."""
        is_pinned = self._counts.is_cuda
        return torch.tensor(values, dtype=dtype, pin_memory=is_pinned).to(self._counts.device, non_blocking=True)
