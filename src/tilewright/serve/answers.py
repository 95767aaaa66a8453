"""Answers as they come from the engine: text up to a stop text, and the objects that clients read."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tilewright.engine import Generation
from tilewright.serve.metrics import Metrics, Timing


@dataclass(frozen=True)
class Part:
    """New text of an answer; the last one says why it ended."""

    text: str
    reason: str | None = None


async def parts(generation: Generation, stops: Sequence[str], metrics: Metrics) -> AsyncIterator[Part]:
    """Text of a request, without the stop text that ends it.

    Text that could be the beginning of a stop text is held back until it is or is not.  Leaving early cancels.
    """
    timing = Timing(metrics)
    held, pieces = "", aiter(generation)
    try:
        async for piece in pieces:
            if piece.token >= 0:
                timing.token()
            held += piece.text
            if places := [place for stop in stops if (place := held.find(stop)) >= 0]:
                yield Part(held[: min(places)], "stop")
                return
            ready = len(held) - _beginning(held, stops)
            if ready:
                yield Part(held[:ready])
                held = held[ready:]
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    reason = generation.result().reason
    yield Part(held, "length" if reason == "length" else "stop")


def _beginning(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of `text` with which some stop text begins."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


class Completion:
    """Objects of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    @staticmethod
    def choice(index: int, text: str, reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        """One finished answer."""
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    chunk_choice = choice


class Chat:
    """Objects of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    @staticmethod
    def choice(index: int, text: str, reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        """One finished answer."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs}

    @staticmethod
    def chunk_choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
        """New text of a streamed answer."""
        delta = {"role": "assistant", "content": text}
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}


class Envelope:
    """What surrounds the choices of one answer."""

    def __init__(self, form: type[Completion] | type[Chat], model: str) -> None:
        self.form = form
        self._common = {"id": f"{form.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """An answer that is not streamed."""
        return {"object": self.form.kind, **self._common, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """One event of a stream."""
        return {"object": self.form.chunk_kind, **self._common, "choices": choices, "usage": usage}


def usage(generations: Sequence[Generation]) -> dict[str, int]:
    """Tokens of finished requests."""
    outputs = [generation.result() for generation in generations]
    prompt, new = sum(len(o.prompt) for o in outputs), sum(len(o.tokens) for o in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
