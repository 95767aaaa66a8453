"""Which requests a load has and when each arrives: a function of its numbers and a seed alone."""

import math
import random
import re
from dataclasses import dataclass

from tilewright.errors import InputError


@dataclass(frozen=True)
class Range:
    """Whole numbers from low to high, both included, each as likely as another."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Range":
        """Range(64, 64) from "64", Range(64, 256) from "64-256".  Raises InputError for anything else."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if match is None:
            raise InputError(f"{text} is no length; write 128, or 64-256.")
        return cls(int(match[1]), int(match[2] or match[1]))


@dataclass(frozen=True)
class Request:
    """arrival: seconds after the load begins.   prompt: tokens.   output: new tokens.   seed: of its draws."""

    arrival: float
    prompt: list[int]
    output: int
    seed: int


@dataclass(frozen=True)
class Workload:
    """A load.

    requests     how many.
    rate         requests a second, which arrive as a Poisson process; infinite: all at once.
    prompt       tokens of a prompt, each drawn from 0 to vocabulary - 1.
    output       new tokens of a request.
    vocabulary   below it are the tokens of prompts.
    seed         of arrivals, lengths, tokens and of the requests' own seeds.

    Raises InputError for numbers that make no load.
    """

    requests: int
    rate: float = math.inf
    prompt: Range = Range(128, 128)
    output: Range = Range(128, 128)
    vocabulary: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.vocabulary < 1 or not self.rate > 0:
            raise InputError("a load has at least 1 request, a vocabulary of at least 1, and a rate above 0.")
        for name, its in {"prompt": self.prompt, "output": self.output}.items():
            if not 1 <= its.low <= its.high:
                raise InputError(f"{name} lengths are {its.low} to {its.high}; needs 1 or more, the smaller one first.")

    def draw(self) -> list[Request]:
        """The requests, in the order of their arrival."""
        source, arrival = random.Random(self.seed), 0.0
        drawn: list[Request] = []
        for _ in range(self.requests):
            prompt = source.choices(range(self.vocabulary), k=source.randint(self.prompt.low, self.prompt.high))
            output = source.randint(self.output.low, self.output.high)
            drawn.append(Request(arrival, prompt, output, source.getrandbits(31)))
            arrival += source.expovariate(self.rate) if math.isfinite(self.rate) else 0.0
        return drawn
