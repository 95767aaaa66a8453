"""Which tokens the next step computes.

A step holds at most `step_tokens` tokens of at most `max_batch` sequences.  Sequences that decode come first, one token
each, then prompts in order of arrival, in chunks.  Where pages are short, the sequence admitted last gives its own back
and waits at the head of the queue.  A request is accepted only if it fits the cache alone, so the oldest always ends.
"""

from collections import deque
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from tilewright.engine.pages import PagePool
from tilewright.engine.sequence import Sequence, Status

_SCORED = 1024  # tokens of one step whose logits are all kept: 0.3 GB at 128k tokens of vocabulary in bf16


@dataclass
class Chunk:
    """Tokens start .. start + count of one sequence.   draws: the last one is the sequence's newest, so its logits draw
    another.   admission: the sequence's when this was planned; after another its pages are others.   drafts: speculated
    tokens behind it, computed too; `accept` makes those tokens of the chunk that were drawn.  UNKNOWN ones are
    read with the results.   scored: its first tokens, behind each of which the prompt's next token gets its
    log-probability.
    """

    sequence: Sequence
    start: int
    count: int
    draws: bool
    admission: int
    drafts: tuple[int, ...] = ()
    scored: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def shows_top(self) -> bool:
        """True where the draw is told with its alternatives."""
        params = self.sequence.params
        return self.draws and params.logprobs and params.top_logprobs > 0


class Scheduler:
    """All requests, from `add` to `finish`.

    drafts: tokens that a sequence may speculate in one step.  Results of a step are then read before the next is
    planned, and step_tokens is at least max_batch * (1 + drafts).
    """

    def __init__(self, pool: PagePool, max_batch: int, step_tokens: int, drafts: int = 0) -> None:
        self.pool, self.max_batch, self.step_tokens, self.drafts = pool, max_batch, step_tokens, drafts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = self.draft_tokens = self.accepted_tokens = 0
        self._slots = list(range(max_batch - 1, -1, -1))
        self._unscored = 0  # tokens that the step being planned may still score

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> list[Chunk]:
        """The chunks of the next step, in the order of their rows; empty if nothing can be computed now.

        The caller computes them in this order on one stream: pages change hands without a wait.
        """
        chunks: dict[int, Chunk] = {}  # by slot
        room, self._unscored = self.step_tokens, _SCORED
        decoding = [each for each in self.running if each.remaining == 1]
        for sequence in decoding + [each for each in self.running if each.remaining > 1]:
            if sequence.status is Status.RUNNING and room:
                room -= self._extend(sequence, room, chunks)
        while self.waiting and room and self._slots and (admitted := self._admit(room)) is not None:
            chunks[admitted.sequence.slot] = admitted
            room -= admitted.count
        planned = list(chunks.values())
        for chunk in planned:
            chunk.sequence.cached += chunk.count
            chunk.sequence.unread += chunk.draws
        return planned

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence; queued steps may still write its pages, and their next holder is queued behind."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status, sequence.reason = Status.FINISHED, reason

    def accept(self, chunk: Chunk, drawn: Sequences[int]) -> int:
        """The GPU has written the keys and values of `chunk`: others may begin with them.

        drawn: behind the chunk, and behind each draft.   Returns how many of them are the sequence's: those before
        which every draft is what was drawn in its place.
        """
        sequence = chunk.sequence
        sequence.unread -= chunk.draws
        accepted = 0
        for draft, token in zip(chunk.drafts, drawn, strict=False):
            if draft != token:
                break
            accepted += 1
        if sequence.status is Status.RUNNING and sequence.admissions == chunk.admission:
            self.draft_tokens += len(chunk.drafts)
            self.accepted_tokens += accepted
            chunk.count += accepted
            sequence.cached += accepted
            size = self.pool.page_size
            if chunk.end // size > chunk.start // size:
                self.pool.publish([*sequence.tokens, *chunk.drafts][: chunk.end], sequence.pages, sequence.adapter)
        return accepted + 1 if chunk.draws else 0

    def _extend(self, sequence: Sequence, room: int, chunks: dict[int, Chunk]) -> int:
        """Plan a chunk of a running sequence, at the cost of those admitted after it; returns its tokens."""
        count = self._count(sequence, room)
        while not self._grow(sequence, count):
            victim = self.running[-1]
            chunks.pop(victim.slot, None)
            self._preempt(victim)
            if victim is sequence:
                return 0
        if not count:
            return 0
        chunk = chunks[sequence.slot] = self._chunk(sequence, count)
        chunk.drafts = self._draft(sequence, room) if count == 1 else ()
        return count + len(chunk.drafts)

    def _draft(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        """Speculate as many tokens as there are room and pages for."""
        count = min(self.drafts, room - 1, sequence.longest - sequence.total - 1)
        drafts = sequence.draft(count) if sequence.remaining == 1 else ()
        return drafts if self._grow(sequence, 1 + len(drafts)) else ()

    def _admit(self, room: int) -> Chunk | None:
        """Plan the first chunk of the oldest waiting request; None where it has to wait."""
        sequence = self.waiting[0]
        if sequence.unread:  # preempted in the step before: its newest token is not known yet
            return None
        sequence.pages = [] if sequence.scores_prompt else self.pool.take_prefix(sequence.tokens[:-1], sequence.adapter)
        sequence.cached = sequence.reused = len(sequence.pages) * self.pool.page_size
        count = self._count(sequence, room)
        if not count or not self._grow(sequence, count):
            self._drop_pages(sequence)
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.status, sequence.slot = Status.RUNNING, self._slots.pop()
        sequence.admissions += 1
        return self._chunk(sequence, count)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Have pages for `count` more tokens; False if there are none."""
        needed = -(-(sequence.cached + count) // self.pool.page_size) - len(sequence.pages)
        pages = self.pool.allocate(max(needed, 0))
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        self._drop_pages(sequence)

    def _drop_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.cached = [], 0

    def _count(self, sequence: Sequence, room: int) -> int:
        """Tokens of the next chunk of a sequence; 0 where it has to wait for a step that may score it."""
        count = min(sequence.remaining, room)
        return min(count, self._unscored) if sequence.scores_prompt else count

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        draws = sequence.cached + count == sequence.total
        scored = min(count, sequence.prompt_length - 1 - sequence.cached) if sequence.scores_prompt else 0
        self._unscored -= max(scored, 0)
        return Chunk(sequence, sequence.cached, count, draws, sequence.admissions, scored=max(scored, 0))
