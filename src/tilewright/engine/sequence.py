"""One request inside the engine.

    WAITING --admitted--> RUNNING --end of text, length, cancelled, failed--> FINISHED
       ^                     |
       +------preempted------+     its pages are released; it computes them again

A running sequence computes its tokens in chunks until all of them are cached; the chunk that reaches the last one also
draws the next.  The host reads a drawn token one step later, so up to two are unread while a third is not begun.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from tilewright.engine.lookup import PromptLookup
from tilewright.engine.params import SamplingParams


class Status(Enum):
    """Where a request is, as drawn above."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and read tokens.   cached: how many have keys and values in the pages, those of queued steps
    included.   unread: drawn tokens, the newest ones, that only the device knows.   pages: in order of positions.
    slot: row of the device's state, while it runs.   reused: tokens that the last admission found in the cache.
    lookup: what it speculates with, or None.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int
    stops: frozenset[int]
    lookup: PromptLookup | None = None
    prompt_length: int = 0
    status: Status = Status.WAITING
    cached: int = 0
    unread: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    reused: int = 0
    admissions: int = 0
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens so far, the unread ones included."""
        return len(self.tokens) + self.unread

    @property
    def longest(self) -> int:
        """Tokens when it ends by its length."""
        return self.prompt_length + self.params.max_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next is drawn; 0 when all that it may draw are drawn."""
        return 0 if self.total >= self.longest else self.total - self.cached

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def read(self, token: int, logprob: float | None) -> None:
        """Take the next token; it may end the sequence."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in self.stops:
            self.reason = "stop"
        elif len(self.tokens) == self.longest:
            self.reason = "length"
