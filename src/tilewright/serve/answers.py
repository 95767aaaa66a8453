"""Answers as they come from the engine, and the objects that clients read."""

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


async def parts(generation: Generation, metrics: Metrics) -> AsyncIterator[Part]:
    """Text of a request as it comes, then why it ended.  Leaving early cancels."""
    timing, pieces = Timing(metrics), aiter(generation)
    try:
        async for piece in pieces:
            if piece.token >= 0:
                timing.token()
            if piece.text:
                yield Part(piece.text)
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    yield Part("", "length" if generation.result().reason == "length" else "stop")


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
