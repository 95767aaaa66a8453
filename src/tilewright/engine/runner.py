"""Computes steps: from tokens, through the model and the sampler, to the next tokens, without waiting for them.

Steps in which every sequence has one token are CUDA graphs, one for each of a few batch sizes, as are those in which
some have drafts beside it, and those with penalties or adapters; a smaller batch is padded with sequences of length 0,
which write no keys.  So are steps of few tokens with parts of prompts, whose launches would take the host longer than
the GPU takes for the step; tokens behind the last sequence write no keys either.  A drawn token stays on the device, in
the row of its sequence's slot, where the next step finds it; the host reads it when it has queued that step.  Drafts of
a model are made in the step that verifies them.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from tilewright.engine.draft import DraftModel
from tilewright.engine.drafter import UNKNOWN
from tilewright.engine.grammar import apply
from tilewright.engine.inputs import Sizes, Step, StepInputs
from tilewright.engine.model import PagedModel, Pages
from tilewright.engine.penalties import Drafts, Penalties
from tilewright.engine.scheduler import Chunk
from tilewright.engine.scores import Rows, score, scores
from tilewright.engine.sequence import Score
from tilewright.errors import BackendError
from tilewright.generate.graphs import StepGraphs
from tilewright.log import logger
from tilewright.ops.sampling.sample import sample

_FEWEST, _MOST = 16, 512  # tokens of a graph with parts of prompts; launches of longer steps hide behind the GPU


class Results:
    """Tokens of a queued step.  `read` waits for them."""

    def __init__(
        self, chunks: Sequence[Chunk], outputs: Tensor, scored: Tensor | None, event: torch.cuda.Event | None
    ) -> None:
        self.chunks, self._outputs, self._scored, self._event = chunks, outputs, scored, event

    def read(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities behind each chunk and its drafts; meaningless where a chunk draws nothing.

        Chunks with UNKNOWN drafts get those that the device made.
        """
        if self._event is not None:
            self._event.synchronize()
        counts = [1 + len(chunk.drafts) for chunk in self.chunks]
        tokens, logprobs, *before = self._outputs[:, : sum(counts)].tolist()
        parts = [
            slice(start, start + count) for start, count in zip(accumulate(counts, initial=0), counts, strict=False)
        ]
        for chunk, part in zip(self.chunks, parts, strict=True):
            if UNKNOWN in chunk.drafts:
                chunk.drafts = tuple(int(token) for token in before[0][part][1:])
        return [([int(token) for token in tokens[part]], logprobs[part]) for part in parts]

    def scores(self) -> list[list[Score]]:
        """What each chunk scored, after `read`."""
        return scores(self.chunks, self._scored)


class Runner:
    """One model and its state on the device.  One thread uses it, on one stream."""

    def __init__(self, model: PagedModel, sizes: Sizes, graphs: bool | None, draft: DraftModel | None = None) -> None:
        """graphs: True must, None may, False does not capture.   draft: what makes UNKNOWN drafts."""
        device = model.device
        self.model, self.sizes, self._draft = model, sizes, draft
        self._inputs = StepInputs(sizes, device)
        # The newest token of each slot, then its first draft of a model, and so on
        self._newest = torch.zeros(1 + sizes.drafts, sizes.max_batch + 1, dtype=torch.int64, device=device)
        # Tokens, their log-probabilities, and with a draft model the token before each.  float64 holds tokens up to
        # 2^22 and log-probabilities exactly: one copy for all
        self._outputs = torch.zeros(2 if draft is None else 3, sizes.rows, dtype=torch.float64, device=device)
        pinned = device.type == "cuda"
        self._read = [torch.zeros(self._outputs.shape, dtype=torch.float64, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._penalties: Penalties | None = None  # until a request has any: V numbers for each slot
        self._must_capture = graphs is True
        can_capture = graphs is not False and device.type == "cuda"
        self._graphs = StepGraphs(device, torch.Generator(device)) if can_capture else None
        self._captures_prompts = True  # until a model shows that it cannot

    def launch(self, chunks: Sequence[Chunk]) -> Results:
        """Queue a step on the current stream.  The results of the step before the last have been read."""
        step, scored_rows, masks, scored = self._step(chunks), Rows.of(chunks), _masks(chunks), None
        if step.has_penalties:
            if self._penalties is None:
                self._penalties = Penalties(self.sizes.max_batch + 1, self.model.vocabulary, self.model.device)
            self._penalties.prepare(chunks)
        padded = self._padded(step) if scored_rows is None and not masks else None
        if padded is not None and self._capture(padded):
            self._fill(chunks, padded)
            assert self._graphs is not None
            self._graphs.replay(padded)
        else:
            self._fill(chunks, step)
            scored = self._compute(step, scored_rows, masks)
            scored = None if scored is None else scored.to("cpu", non_blocking=True)  # into pinned memory
        read, event = self._read[self._turn], None
        self._turn = 1 - self._turn
        read.copy_(self._outputs, non_blocking=True)
        if self._outputs.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return Results(chunks, read, scored, event)

    def capture(self) -> None:
        """Have the graph of every batch size, and with drafts if there may be any; none with penalties or adapters."""
        for batch in range(1, self.sizes.max_batch + 1):
            steps = [Step(batch * (1 + drafts), batch, batch * drafts) for drafts in {0, self.sizes.drafts}]
            steps += [Step(tokens, batch, 0) for tokens in range(batch + 1, _MOST + 1)]
            for step in dict.fromkeys(self._padded(step) for step in steps):
                if step is not None:
                    self._capture(step)

    def padded(self, batch: int) -> int:
        """The batch size whose graph serves `batch` sequences."""
        return min(_rounded(batch), self.sizes.max_batch)

    def _step(self, chunks: Sequence[Chunk]) -> Step:
        drafts = sum(len(chunk.drafts) for chunk in chunks)
        tokens, batch = sum(chunk.count for chunk in chunks) + drafts, len(chunks)
        has_penalties = any(chunk.draws and chunk.sequence.params.changes_logits for chunk in chunks)
        has_adapters = any(chunk.sequence.adapter for chunk in chunks)
        return Step(tokens, batch, drafts, has_penalties, has_adapters)

    def _padded(self, step: Step) -> Step | None:
        """The shape of the graph that serves a step; None where none does."""
        if step.tokens == step.rows:  # one token, and drafts, for each sequence
            batch = self.padded(step.batch)
            drafts = batch * self.sizes.drafts if step.drafts else 0
            return step._replace(tokens=batch + drafts, batch=batch, drafts=drafts)
        batch = min(size for size in (1, 8, 64, self.sizes.max_batch) if step.batch <= size <= self.sizes.max_batch)
        tokens = max(_FEWEST, _rounded(max(step.tokens, batch + 1)))
        if step.drafts or not self._captures_prompts or tokens > min(_MOST, self.sizes.step_tokens):
            return None
        return step._replace(tokens=tokens, batch=batch)

    def _capture(self, step: Step) -> bool:
        """Have the graph of `step`; False where steps are launched one by one.

        Its warm-up runs with sequences of length 0 alone.
        """
        if self._graphs is None or step in self._graphs:
            return self._graphs is not None
        self._wait()  # `fill` below takes a turn that no step has
        self._fill((), step)

        def decode() -> None:
            self._compute(step)

        try:
            self._graphs.capture(step, decode, lambda: None)
        except BackendError as error:
            if step.tokens != step.rows:
                logger.info("steps with parts of prompts are launched one by one, without CUDA graphs: %s", error)
                self._captures_prompts = False
            elif self._must_capture:
                raise
            else:
                logger.warning("steps are launched one by one, without CUDA graphs: %s", error)
                self._graphs = None
        self._wait()
        return self._graphs is not None and step in self._graphs

    def _fill(self, chunks: Sequence[Chunk], step: Step) -> None:
        self._inputs.fill(chunks, step)
        if self._draft is not None:
            self._draft.fill(chunks, step)

    def _wait(self) -> None:
        torch.cuda.current_stream(self.model.device).synchronize()

    def _compute(
        self, step: Step, scored: Rows | None = None, masks: Mapping[int, Tensor] = MappingProxyType({})
    ) -> Tensor | None:
        """Compute a step; returns what `score` says of the rows `scored`.   masks: of rows that keep to a grammar."""
        inputs, tokens, rows, batch = self._inputs.device, step.tokens, step.rows, step.batch
        penalties = self._penalties if step.has_penalties else None
        if self._draft is not None:
            self._draft.compute(step, inputs("drafts", batch), self._newest[1:], penalties)
        sources = inputs("sources", tokens)
        ids = torch.where(sources < 0, inputs("ids", tokens), self._newest.view(-1)[sources.clamp(min=0)])
        cu_seqlens = None if step.is_decode else inputs("cu_seqlens", batch + 1)
        pages = Pages(self.model.layers, inputs("lengths", batch), inputs("block_table", batch), cu_seqlens)
        places = inputs("rows", rows)
        if scored is not None:
            places = torch.cat([places, places.new_tensor(scored.rows)])
        adapters = inputs("adapters", tokens) if step.has_adapters else None
        every = self.model.forward(ids, inputs("positions", tokens), places, pages, adapters)
        logits = every[:rows]
        if penalties is not None:
            most = self.sizes.drafts if step.drafts else 0
            drafts = Drafts(ids[places[:rows]], inputs("draft_numbers", rows), most)
        drawn = sample(
            apply(logits if penalties is None else penalties.apply(logits, self._inputs, drafts.before()), masks),
            inputs("seeds", rows),
            inputs("draw_positions", rows),
            temperature=inputs("temperature", rows),
            top_k=inputs("top_k", rows),
            top_p=inputs("top_p", rows),
            min_p=inputs("min_p", rows),
            logprobs="model",
        )
        next_tokens, logprobs = drawn
        columns = next_tokens.clamp(min=0)  # a row of NaN draws -1
        if penalties is not None:
            logprobs = logits.float().log_softmax(1).gather(1, columns[:, None])[:, 0]
            penalties.add(columns, self._inputs, drafts.accepted(next_tokens))
        self._newest[0].index_copy_(0, inputs("slots", rows), columns)
        self._outputs[0, :rows] = next_tokens
        self._outputs[1, :rows] = logprobs
        if self._draft is not None:
            self._outputs[2, :rows] = ids[places[:rows]]
        return None if scored is None else score(every[rows:], places.new_tensor(scored.targets), scored.top)


def _rounded(count: int) -> int:
    """`count` rounded up to a power of two, or to one and a half times that."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power > 2 and count <= 3 * power // 4 else power


def _masks(chunks: Sequence[Chunk]) -> dict[int, Tensor]:
    """Masks of the grammars of a step, by row."""
    masks: dict[int, Tensor] = {}
    row = 0
    for chunk in chunks:
        if chunk.draws and chunk.sequence.matcher is not None:
            masks.update(enumerate(chunk.sequence.matcher.masks(chunk.drafts), row))
        row += 1 + len(chunk.drafts)
    return masks
