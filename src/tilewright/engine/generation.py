"""What a caller holds of a request: its tokens as they come, its end, and a way to cancel it."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewright.engine.sequence import Sequence
from tilewright.engine.text import TextStream
from tilewright.errors import TilewrightError


@dataclass(frozen=True)
class Output:
    """A finished request.

    tokens    new tokens, an end-of-text token included.   text: of them; "" without a tokenizer.
    reason    "stop": an end-of-text or stop token; "length": max_tokens; "cancelled".
    logprobs  one for each token, if they were requested.   reused: prompt tokens whose keys were in the cache already.
    top_logprobs         of the likeliest tokens, for each token, in descending order.
    prompt_logprobs      one for each token of the prompt, if they were requested; None for the first.
    prompt_top_logprobs  the same of the likeliest tokens in their place.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    reason: str
    logprobs: list[float] | None
    reused: int
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None


@dataclass(frozen=True)
class Piece:
    """A token, and the text that it completes; "" without a tokenizer, and while a character is not whole."""

    token: int
    text: str


class Generation:
    """A request that was submitted.  Iterate over it, once, for its pieces; `result` waits for its end.

    Any thread may call any method.  An error, of this request or of the engine, is raised to those who
    iterate or wait.
    """

    def __init__(self, sequence: Sequence, tokenizer: Any, wake: Callable[[], None]) -> None:
        self._sequence, self._tokenizer, self._wake = sequence, tokenizer, wake
        self._pieces: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._outcome: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._notify: Callable[[], Any] | None = None
        self._delivered = 0
        self.cancelled = False

    def cancel(self) -> None:
        """End the request as soon as possible; its result has the tokens so far and the reason "cancelled"."""
        self.cancelled = True
        self._wake()

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the end.  timeout: seconds, after which TimeoutError is raised and the request goes on."""
        try:
            self._outcome.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"the request has not ended after {timeout} s.") from None
        self._outcome.put(None)  # for others who wait
        if self._error is not None:
            raise TilewrightError(f"the request failed: {self._error}") from self._error
        sequence = self._sequence
        assert sequence.reason is not None
        new = sequence.new_tokens
        text = "" if self._tokenizer is None else self._tokenizer.decode(new, skip_special_tokens=True)
        prompt = sequence.tokens[: sequence.prompt_length]
        params, places = sequence.params, range(len(prompt))
        return Output(
            prompt,
            new,
            text,
            sequence.reason,
            list(sequence.logprobs) if params.logprobs else None,
            sequence.reused,
            list(sequence.top[: len(new)]) if params.logprobs and params.top_logprobs else None,
            [sequence.prompt_logprobs.get(place) for place in places] if params.prompt_logprobs else None,
            [sequence.prompt_top.get(place) for place in places]
            if params.prompt_logprobs and params.top_logprobs
            else None,
        )

    def __iter__(self) -> Iterator[Piece]:
        text = None if self._tokenizer is None else TextStream(self._tokenizer)
        while (token := self._pieces.get()) is not None:
            yield Piece(token, "" if text is None else text.push(token))
        self.result()
        if text is not None and (rest := text.end()):
            yield Piece(-1, rest)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The same in an event loop, without a thread that waits; leaving the loop early cancels the request."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        text = None if self._tokenizer is None else TextStream(self._tokenizer)
        self._notify = partial(loop.call_soon_threadsafe, arrived.set)
        try:
            while True:
                while not self._pieces.empty():
                    token = self._pieces.get()
                    if token is None:
                        self.result()
                        if text is not None and (rest := text.end()):
                            yield Piece(-1, rest)
                        return
                    yield Piece(token, "" if text is None else text.push(token))
                await arrived.wait()
                arrived.clear()
        finally:
            self._notify = None
            if not self.done:
                self.cancel()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self._sequence.prompt_length

    @property
    def done(self) -> bool:
        """True once the request has ended."""
        return not self._outcome.empty()

    # For the engine's thread.

    def deliver(self) -> None:
        """Hand out the tokens that the sequence has since the last time."""
        for token in self._sequence.new_tokens[self._delivered :]:
            self._pieces.put(token)
            self._delivered += 1
        self._wake_reader()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing comes any more."""
        self._error = error
        self._outcome.put(None)
        self._pieces.put(None)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if (notify := self._notify) is not None:
            with suppress(RuntimeError):  # the reader's event loop is closed
                notify()
