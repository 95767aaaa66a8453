"""What a step reads, in memory that stays where it is, so that a CUDA graph can read it.

Every array has one home on the device and two in pinned host memory, used in turn: the host fills one while the copy
from the other may still wait for the GPU.  Before an array is filled again, the results of its step have been read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.engine.drafter import UNKNOWN
from tilewright.engine.scheduler import Chunk

_INT64 = (
    *("ids", "sources", "positions", "adapters"),
    *("rows", "slots", "penalty_slots", "draft_numbers", "seeds", "draw_positions"),
)
_INT32 = ("cu_seqlens", "lengths", "drafts", "top_k")
_FLOAT32 = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_OF_PARAMS = (*_FLOAT32, "top_k")
_NEUTRAL = {"sources": -1, "top_p": 1, "repetition_penalty": 1}  # others: 0
_DTYPES = {
    **dict.fromkeys(_INT64, torch.int64),
    **dict.fromkeys(_INT32, torch.int32),
    **dict.fromkeys(_FLOAT32, torch.float32),
    "block_table": torch.int32,
}
_OF_TOKENS = ("ids", "sources", "positions", "adapters")
_OF_ROWS = ("rows", "slots", "penalty_slots", "draft_numbers", "seeds", "draw_positions", *_OF_PARAMS)


@dataclass(frozen=True)
class Sizes:
    """step_tokens: T of the largest step.   drafts: speculated tokens of a sequence in one step, at most.
    spare: the slot of rows that draw nothing.   rows: R of the largest step.
    """

    step_tokens: int
    max_batch: int
    max_pages: int
    drafts: int

    @property
    def spare(self) -> int:
        return self.max_batch

    @property
    def rows(self) -> int:
        return self.max_batch * (1 + self.drafts)


class Step(NamedTuple):
    """Shape of a step, padding included: T tokens, of which some are drafts, and B sequences.

    has_penalties: logits of some sequences are changed.   has_adapters: the model is, for some.
    """

    tokens: int
    batch: int
    drafts: int
    has_penalties: bool = False
    has_adapters: bool = False

    @property
    def rows(self) -> int:
        """R rows of logits: one for each sequence and one for each draft."""
        return self.batch + self.drafts

    @property
    def is_decode(self) -> bool:
        """One token for each sequence."""
        return self.tokens == self.batch

    @property
    def without_drafts(self) -> "Step":
        """The step of a draft model, which is the same for all requests."""
        return Step(self.tokens - self.drafts, self.batch, 0)


class StepInputs:
    """ids          (T,) tokens, and for those that only the device knows any number
    sources         (T,) where a token lies on the device, or -1: the newest token of a slot at the slot, its i-th draft
                    i * (max_batch + 1) behind that
    positions       (T,)   adapters (T,) the number of a token's adapter, or 0
    rows            (R,) the token behind which a row's logits are: the last of a chunk, and each of its drafts
    slots           (R,) where a drawn token goes
    penalty_slots   (R,) where its counts and biases are
    draft_numbers   (R,) i behind the i-th draft of a chunk, from 1 on; 0 behind the chunk
    seeds, draw_positions, temperature, top_k, top_p, min_p   (R,) as `ops.sample` takes them
    repetition_penalty, presence_penalty, frequency_penalty   (R,)
    cu_seqlens      (B + 1,)   lengths, drafts (B,)   block_table (B, max_pages)
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_OF_TOKENS, (sizes.step_tokens,))
        shapes |= dict.fromkeys(_OF_ROWS, (sizes.rows,))
        shapes |= {"cu_seqlens": (sizes.max_batch + 1,)} | dict.fromkeys(("lengths", "drafts"), (sizes.max_batch,))
        shapes |= {"block_table": (sizes.max_batch, sizes.max_pages)}
        self._device = {n: torch.zeros(shapes[n], dtype=d, device=device) for n, d in _DTYPES.items()}
        pinned = device.type == "cuda"
        self._host = [
            {n: torch.zeros(shapes[n], dtype=d, pin_memory=pinned) for n, d in _DTYPES.items()} for _ in range(2)
        ]
        self._turn = 0

    def device(self, name: str, count: int) -> Tensor:
        """The first `count` entries on the device."""
        return self._device[name][:count]

    def fill(self, chunks: Sequence[Chunk], step: Step) -> None:
        """Queue copies of a step of `chunks`, padded to its shape, on the current stream."""
        host = self._host[self._turn]
        self._turn = 1 - self._turn
        counts = dict.fromkeys(_DTYPES, step.batch)
        counts |= dict.fromkeys(_OF_TOKENS, step.tokens) | dict.fromkeys(_OF_ROWS, step.rows)
        counts["cu_seqlens"] = step.batch + 1
        views = {name: array.numpy()[: counts[name]] for name, array in host.items()}
        for name, view in views.items():
            view[:] = _NEUTRAL.get(name, 0)
        for name in ("slots", "penalty_slots"):
            views[name][:] = self.sizes.spare
        start, row, slots = 0, 0, self.sizes.max_batch + 1
        for index, chunk in enumerate(chunks):
            sequence, end = chunk.sequence, start + chunk.count
            tokens_read = sequence.tokens[chunk.start : chunk.end]
            views["ids"][start : start + len(tokens_read)] = tokens_read
            if len(tokens_read) < chunk.count:  # the newest token, drawn by a step that is still queued
                views["sources"][end - 1] = sequence.slot
            length = chunk.end + len(chunk.drafts)
            first, start, last = start, end + len(chunk.drafts), row + 1 + len(chunk.drafts)
            views["ids"][end:start] = chunk.drafts
            if UNKNOWN in chunk.drafts:
                views["sources"][end:start] = [sequence.slot + (i + 1) * slots for i in range(len(chunk.drafts))]
            views["positions"][first:start] = range(chunk.start, length)
            views["adapters"][first:start] = sequence.adapter
            views["rows"][row:last] = range(end - 1, start)
            views["draw_positions"][row:last] = range(chunk.end, length + 1)
            views["lengths"][index], views["drafts"][index] = length, len(chunk.drafts)
            views["block_table"][index, : len(sequence.pages)] = sequence.pages
            views["draft_numbers"][row:last] = range(last - row)
            if chunk.draws:
                views["slots"][row] = sequence.slot
                if sequence.params.changes_logits:
                    views["penalty_slots"][row:last] = sequence.slot
            views["seeds"][row:last] = sequence.seed
            for name in _OF_PARAMS:
                views[name][row:last] = getattr(sequence.params, name)
            views["cu_seqlens"][index + 1] = start
            row = last
        views["cu_seqlens"][len(chunks) + 1 :] = start
        for name, array in host.items():
            self._device[name][: counts[name]].copy_(array[: counts[name]], non_blocking=True)
