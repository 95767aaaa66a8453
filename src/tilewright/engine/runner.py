"""Computes steps: from tokens, through the model and the sampler, to the next tokens, without waiting for them.

Steps in which every sequence has one token are CUDA graphs, one for each of a few batch sizes; a smaller batch is
padded with sequences of length 0, which write no keys.  A drawn token stays on the device, in the row of its sequence's
slot, where the next step finds it; the host reads it when it has queued that step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from tilewright.engine.grammar import apply
from tilewright.engine.inputs import Sizes, StepInputs
from tilewright.engine.model import PagedModel, Pages
from tilewright.engine.scheduler import Chunk
from tilewright.engine.scores import Rows, score, scores
from tilewright.engine.sequence import Score
from tilewright.errors import BackendError
from tilewright.generate.graphs import StepGraphs
from tilewright.log import logger
from tilewright.ops.sampling.sample import sample


class Results:
    """Tokens of a queued step.  `read` waits for them."""

    def __init__(
        self, chunks: Sequence[Chunk], outputs: Tensor, scored: Tensor | None, event: torch.cuda.Event | None
    ) -> None:
        self.chunks, self._outputs, self._scored, self._event = chunks, outputs, scored, event

    def read(self) -> list[tuple[int, float]]:
        """Token and log-probability behind each chunk; meaningless where a chunk draws nothing."""
        if self._event is not None:
            self._event.synchronize()
        tokens, logprobs = self._outputs[:, : len(self.chunks)].tolist()
        return [(int(token), logprob) for token, logprob in zip(tokens, logprobs, strict=True)]

    def scores(self) -> list[list[Score]]:
        """What each chunk scored, after `read`."""
        return scores(self.chunks, self._scored)


class Runner:
    """One model and its state on the device.  One thread uses it, on one stream."""

    def __init__(self, model: PagedModel, sizes: Sizes, graphs: bool | None) -> None:
        """graphs: True must, None may, False does not capture."""
        device = model.device
        self.model, self.sizes = model, sizes
        self._inputs = StepInputs(sizes, device)
        self._newest = torch.zeros(sizes.max_batch + 1, dtype=torch.int64, device=device)
        # float64 holds tokens up to 2^22 and log-probabilities exactly: one copy for both
        self._outputs = torch.zeros(2, sizes.max_batch, dtype=torch.float64, device=device)
        pinned = device.type == "cuda"
        self._read = [torch.zeros(self._outputs.shape, dtype=torch.float64, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._must_capture = graphs is True
        can_capture = graphs is not False and device.type == "cuda"
        self._graphs = StepGraphs(device, torch.Generator(device)) if can_capture else None

    def launch(self, chunks: Sequence[Chunk]) -> Results:
        """Queue a step on the current stream.  The results of the step before the last have been read."""
        tokens, batch = sum(chunk.count for chunk in chunks), len(chunks)
        decodes, rows, scored = tokens == batch, Rows.of(chunks), None
        masks = {
            row: chunk.sequence.matcher.mask
            for row, chunk in enumerate(chunks)
            if chunk.draws and chunk.sequence.matcher is not None
        }
        if decodes and rows is None and not masks and self._capture(self.padded(batch)):
            tokens = batch = self.padded(batch)
            self._inputs.fill(chunks, tokens, batch)
            assert self._graphs is not None
            self._graphs.replay(batch)
        else:
            self._inputs.fill(chunks, tokens, batch)
            scored = self._compute(tokens, batch, decodes, rows, masks)
            scored = None if scored is None else scored.to("cpu", non_blocking=True)  # into pinned memory
        read, event = self._read[self._turn], None
        self._turn = 1 - self._turn
        read.copy_(self._outputs, non_blocking=True)
        if self._outputs.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return Results(chunks, read, scored, event)

    def capture(self) -> None:
        """Have the graph of every batch size."""
        for batch in sorted({self.padded(batch) for batch in range(1, self.sizes.max_batch + 1)}):
            self._capture(batch)

    def padded(self, batch: int) -> int:
        """The batch size whose graph serves `batch` sequences: a power of two, or one and a half times that."""
        power = 1 << (batch - 1).bit_length()
        return min(3 * power // 4 if power > 2 and batch <= 3 * power // 4 else power, self.sizes.max_batch)

    def _capture(self, batch: int) -> bool:
        """Have the graph of `batch` sequences; False where steps are launched one by one.

        Its warm-up runs with sequences of length 0 alone.
        """
        if self._graphs is None or batch in self._graphs:
            return self._graphs is not None
        self._wait()  # `fill` below takes a turn that no step has
        self._inputs.fill((), batch, batch)

        def decode() -> None:
            self._compute(batch, batch, decodes=True)

        try:
            self._graphs.capture(batch, decode, lambda: None)
        except BackendError as error:
            if self._must_capture:
                raise
            logger.warning("steps are launched one by one, without CUDA graphs: %s", error)
            self._graphs = None
        self._wait()
        return self._graphs is not None

    def _wait(self) -> None:
        torch.cuda.current_stream(self.model.device).synchronize()

    def _compute(
        self,
        tokens: int,
        batch: int,
        decodes: bool,
        scored: Rows | None = None,
        masks: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Tensor | None:
        """Compute a step; returns what `score` says of the rows `scored`.   masks: of rows that keep to a grammar."""
        inputs, newest = self._inputs.device, self._newest
        sources = inputs("sources", tokens)
        ids = torch.where(sources < 0, inputs("ids", tokens), newest[sources.clamp(min=0)])
        cu_seqlens = None if decodes else inputs("cu_seqlens", batch + 1)
        pages = Pages(self.model.layers, inputs("lengths", batch), inputs("block_table", batch), cu_seqlens)
        rows = inputs("rows", batch)
        if scored is not None:
            rows = torch.cat([rows, rows.new_tensor(scored.rows)])
        logits = self.model.forward(ids, inputs("positions", tokens), rows, pages)
        drawn = sample(
            apply(logits[:batch], masks),
            inputs("seeds", batch),
            inputs("draw_positions", batch),
            temperature=inputs("temperature", batch),
            top_k=inputs("top_k", batch),
            top_p=inputs("top_p", batch),
            min_p=inputs("min_p", batch),
            logprobs="model",
        )
        next_tokens, logprobs = drawn
        newest.index_copy_(0, inputs("slots", batch), next_tokens.clamp(min=0))  # a row of NaN draws -1
        self._outputs[0, :batch] = next_tokens
        self._outputs[1, :batch] = logprobs
        if scored is None:
            return None
        return score(logits[batch:], rows.new_tensor(scored.targets), scored.top)
