"""Speculation by a second, smaller model, which draws the tokens that the target then computes in one pass.

    draft    newest -> d1 -> d2 -> d3 -> keys of d3
    target   newest, d1, d2, d3 -> t1, t2, t3, t4
    host     d1 = t1, d2 = t2, d3 != t3: t1, t2 and t3 are the sequence's

The draft computes every token that the target computes, prompts too, so the keys of both lie in the same pages at the
same places: one table, one length, one tree of prefixes.  A draft is drawn by the seed and position of the token that
it stands for, under the request's own parameters: where both models agree, both draw the same token.  All passes lie in
the stream, and in the graph, of the target's step; no token is read between them.
Sources: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; draws that are coupled by
their random numbers: Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative
decoding", 2024.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilewright.engine.inputs import Sizes, Step, StepInputs
from tilewright.engine.model import PagedModel, Pages
from tilewright.engine.penalties import Penalties
from tilewright.engine.scheduler import Chunk
from tilewright.ops.sampling.sample import sample


class DraftModel:
    """The draft of one runner, with inputs of its own: those of its target without drafts."""

    def __init__(self, model: PagedModel, sizes: Sizes) -> None:
        self.model, self._count = model, sizes.drafts
        self._inputs = StepInputs(replace(sizes, drafts=0), model.device)

    def fill(self, chunks: Sequence[Chunk], step: Step) -> None:
        """Queue copies of a step of `chunks`, padded to its shape, on the current stream."""
        self._inputs.fill([replace(chunk, drafts=()) for chunk in chunks], step.without_drafts)

    def compute(self, step: Step, counts: Tensor, drafted: Tensor, penalties: Penalties | None) -> None:
        """Compute the tokens of a step, and speculate behind them if the step has drafts.

        counts: (B,) int32, drafts of each sequence.   drafted: (k, max_batch + 1) int64, the i-th drafts of all slots.
        penalties: of the step's sequences, before any of its draws.
        """
        (tokens, batch, *_), inputs = step.without_drafts, self._inputs.device
        positions, rows = inputs("positions", tokens), inputs("rows", batch)
        lengths, table = inputs("lengths", batch), inputs("block_table", batch)
        cu_seqlens = None if tokens == batch else inputs("cu_seqlens", batch + 1)
        pages = Pages(self.model.layers, lengths, table, cu_seqlens)
        # The host has read every token: with drafts no step is queued ahead
        logits = self.model.forward(inputs("ids", tokens), positions, rows, pages)
        if not step.drafts:
            return
        each, newest = torch.arange(batch, device=rows.device), positions[rows]
        before: list[tuple[Tensor, Tensor]] = []  # drafts so far, and who has them
        for i in range(self._count):
            if penalties is not None:
                logits = penalties.apply(logits, self._inputs, before)
            ids = self._draw(logits, batch, i)
            drafted[i].index_copy_(0, inputs("slots", batch), ids)
            has_draft = counts > i  # others have length 0: they write no keys
            before.append((ids, has_draft))
            pages = Pages(self.model.layers, torch.where(has_draft, lengths + (i + 1), 0), table, None)
            its_rows = each if i + 1 < self._count else each[:0]  # behind the last draft there are only keys to store
            logits = self.model.forward(ids, torch.where(has_draft, newest + (i + 1), 0), its_rows, pages)

    def _draw(self, logits: Tensor, batch: int, index: int) -> Tensor:
        """Tokens (B,) as the target draws those at this position."""
        inputs = self._inputs.device
        tokens = sample(
            logits,
            inputs("seeds", batch),
            inputs("draw_positions", batch) + index,
            temperature=inputs("temperature", batch),
            top_k=inputs("top_k", batch),
            top_p=inputs("top_p", batch),
            min_p=inputs("min_p", batch),
        )
        assert isinstance(tokens, Tensor)
        return tokens.clamp(min=0)  # a row of NaN draws -1
