"""What a step reads, in memory that stays where it is, so that a CUDA graph can read it.

Every array has one home on the device and two in pinned host memory, used in turn: the host fills one while the copy
from the other may still wait for the GPU.  Before an array is filled again, the results of its step have been read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.engine.scheduler import Chunk

_INT64 = ("ids", "sources", "positions", "rows", "slots", "seeds", "draw_positions")
_INT32 = ("cu_seqlens", "lengths", "top_k")
_FLOAT32 = ("temperature", "top_p", "min_p")
_DTYPES = {
    **dict.fromkeys(_INT64, torch.int64),
    **dict.fromkeys(_INT32, torch.int32),
    **dict.fromkeys(_FLOAT32, torch.float32),
    "block_table": torch.int32,
}
_OF_TOKENS = ("ids", "sources", "positions")


@dataclass(frozen=True)
class Sizes:
    """step_tokens: T of the largest step.   spare: the slot of rows that draw nothing."""

    step_tokens: int
    max_batch: int
    max_pages: int

    @property
    def spare(self) -> int:
        return self.max_batch


class StepInputs:
    """ids          (T,) tokens, and for those that only the device knows any number
    sources         (T,) the slot whose newest token a token is, or -1
    positions       (T,)
    rows            (B,) where the last token of each chunk is
    slots           (B,) where a drawn token goes
    seeds, draw_positions, temperature, top_k, top_p, min_p   (B,) as `ops.sample` takes them
    cu_seqlens      (B + 1,)   lengths (B,)   block_table (B, max_pages)
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_DTYPES, (sizes.max_batch,))
        shapes |= dict.fromkeys(_OF_TOKENS, (sizes.step_tokens,))
        shapes |= {"cu_seqlens": (sizes.max_batch + 1,), "block_table": (sizes.max_batch, sizes.max_pages)}
        self._device = {n: torch.zeros(shapes[n], dtype=d, device=device) for n, d in _DTYPES.items()}
        pinned = device.type == "cuda"
        self._host = [
            {n: torch.zeros(shapes[n], dtype=d, pin_memory=pinned) for n, d in _DTYPES.items()} for _ in range(2)
        ]
        self._turn = 0

    def device(self, name: str, count: int) -> Tensor:
        """The first `count` entries on the device."""
        return self._device[name][:count]

    def fill(self, chunks: Sequence[Chunk], tokens: int, batch: int) -> None:
        """Queue copies of a step of `chunks`, padded to that many tokens and sequences, on the current stream."""
        host = self._host[self._turn]
        self._turn = 1 - self._turn
        views = {name: array.numpy() for name, array in host.items()}
        for name, view in views.items():
            view[: tokens if name in _OF_TOKENS else batch + (name == "cu_seqlens")] = 0
        views["sources"][:tokens] = -1
        views["slots"][:batch] = self.sizes.spare
        views["top_p"][:batch] = 1
        start = 0
        for row, chunk in enumerate(chunks):
            sequence, end = chunk.sequence, start + chunk.count
            tokens_read = sequence.tokens[chunk.start : chunk.end]
            views["ids"][start : start + len(tokens_read)] = tokens_read
            if len(tokens_read) < chunk.count:  # the newest token, drawn by a step that is still queued
                views["sources"][end - 1] = sequence.slot
            views["positions"][start:end] = range(chunk.start, chunk.end)
            views["rows"][row] = end - 1
            views["draw_positions"][row] = chunk.end
            views["lengths"][row] = chunk.end
            views["block_table"][row, : len(sequence.pages)] = sequence.pages
            if chunk.draws:
                views["slots"][row] = sequence.slot
            params = sequence.params
            views["seeds"][row] = sequence.seed
            for name in ("temperature", "top_k", "top_p", "min_p"):
                views[name][row] = getattr(params, name)
            start = views["cu_seqlens"][row + 1] = end
        views["cu_seqlens"][len(chunks) + 1 : batch + 1] = start
        for name, array in host.items():
            count = tokens if name in _OF_TOKENS else batch + (name == "cu_seqlens")
            self._device[name][:count].copy_(array[:count], non_blocking=True)
