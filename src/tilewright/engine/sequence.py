"""One request inside the engine.

    WAITING --admitted--> RUNNING --end of text, length, cancelled, failed--> FINISHED
       ^                     |
       +------preempted------+     its pages are released; it computes them again

A running sequence computes its tokens in chunks until all of them are cached; the chunk that reaches the last one also
draws the next.  The host reads a drawn token one step later, so up to two are unread while a third is not begun.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isnan

from tilewright.engine.drafter import Drafter
from tilewright.engine.grammar import Matcher
from tilewright.engine.params import SamplingParams


class Status(Enum):
    """Where a request is, as drawn above."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class Score:
    """logprob: of a token in softmax(logits).   top: the likeliest tokens and theirs, in descending order."""

    logprob: float
    top: dict[int, float]


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and read tokens.   cached: how many have keys and values in the pages, those of queued steps
    included.   unread: drawn tokens, the newest ones, that only the device knows.   pages: in order of positions.
    slot: row of the device's state, while it runs.   reused: tokens that the last admission found in the cache.
    drafter: what it speculates with, or None.   matcher: of the request's grammar, or None.
    adapter: its number, or 0.
    prompt_logprobs, prompt_top: of the prompt's tokens from the second on, as far as they are read.   top: of the new
    tokens.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int
    stops: frozenset[int]
    drafter: Drafter | None = None
    matcher: Matcher | None = None
    adapter: int = 0
    prompt_length: int = 0
    status: Status = Status.WAITING
    cached: int = 0
    unread: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    reused: int = 0
    admissions: int = 0
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position
    prompt_top: dict[int, dict[int, float]] = field(default_factory=dict)
    reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens so far, the unread ones included."""
        return len(self.tokens) + self.unread

    @property
    def longest(self) -> int:
        """Tokens when it ends by its length; a request for no new token draws one, which is not read."""
        return self.prompt_length + max(self.params.max_tokens, 1)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next is drawn; 0 when all that it may draw are drawn, and while a grammar waits
        for a token to be read.
        """
        if self.matcher is not None and self.unread:
            return 0
        return 0 if self.total >= self.longest else self.total - self.cached

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of the prompt are wanted that have not been read."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def draft(self, most: int) -> tuple[int, ...]:
        """Speculate at most `most` tokens: none that the grammar forbids, and none behind which stop tokens come to be
        allowed, since all draws of a step have one bias.
        """
        forbidden = self.params.min_tokens - (len(self.tokens) - self.prompt_length)  # draws that may be no stop token
        most = most if forbidden <= 0 else min(most, forbidden - 1)
        if self.drafter is None or most < 1:
            return ()
        drafts = self.drafter.drafts(self.tokens, most)
        return drafts if self.matcher is None else self.matcher.allowed(drafts)

    def read(self, token: int, logprob: float | None) -> None:
        """Take the next token; it may end the sequence."""
        if not self.params.max_tokens:
            self.reason = "length"
            return
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.matcher is not None:
            self.matcher.accept(token)
        if token in self.stops or (self.matcher is not None and self.matcher.is_over):
            self.reason = "stop"
        elif len(self.tokens) == self.longest:
            self.reason = "length"

    def take(self, start: int, scores: Iterable[Score]) -> bool:
        """Take the scores of prompt tokens from position `start` on; False if the model computes NaN.

        Those that are computed again after a preemption take the place of the first.
        """
        for position, score in enumerate(scores, start):
            self.prompt_logprobs[position] = score.logprob
            self.prompt_top[position] = score.top
            if isnan(score.logprob):
                return False
        return True
