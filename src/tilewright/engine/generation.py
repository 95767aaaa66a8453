"""What a caller holds of a request: its tokens as they come, its end, and a way to cancel it."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewright.engine.sequence import Sequence
from tilewright.engine.text import StoppedText, TextStream
from tilewright.errors import TilewrightError


@dataclass(frozen=True)
class Output:
    """A finished request.

    tokens    new tokens, an end-of-text token and those of a stop string included.
    text      of the tokens, up to a stop string; "" without a tokenizer.
    reason    "stop": an end-of-text or stop token, or a stop string; "length": max_tokens; "cancelled".
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
    """A token, and the text that it completes; "" without a tokenizer, while a character is not whole, and while it may
    be the beginning of a stop string.
    """

    token: int
    text: str


class Generation:
    """A request that was submitted.  Iterate over it, once, for its pieces; `result` waits for its end.

    Any thread may call any method.  An error, of this request or of the engine, is raised to those who
    iterate or wait.
    """

    def __init__(self, sequence: Sequence, tokenizer: Any, wake: Callable[[], None]) -> None:
        self._sequence, self._tokenizer, self._wake = sequence, tokenizer, wake
        params = sequence.params
        self._stopped = (
            StoppedText(tokenizer, params.stops, params.include_stop_str_in_output, params.min_tokens)
            if params.stops
            else None
        )
        self._pieces: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._outcome: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._notify: Callable[[], Any] | None = None
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
        if self._stopped is not None:
            text = self._stopped.text
        else:
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
        stream = self._stream()
        while (arrived := self._pieces.get()) is not None:
            yield _piece(arrived, stream)
        self.result()
        if stream is not None and (rest := stream.end()):
            yield Piece(-1, rest)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The same in an event loop, without a thread that waits; leaving the loop early cancels the request."""
        loop, news, stream = asyncio.get_running_loop(), asyncio.Event(), self._stream()
        self._notify = partial(loop.call_soon_threadsafe, news.set)
        try:
            while True:
                while not self._pieces.empty():
                    arrived = self._pieces.get()
                    if arrived is None:
                        self.result()
                        if stream is not None and (rest := stream.end()):
                            yield Piece(-1, rest)
                        return
                    yield _piece(arrived, stream)
                await news.wait()
                news.clear()
        finally:
            self._notify = None
            if not self.done:
                self.cancel()

    def _stream(self) -> TextStream | None:
        """What makes text of tokens for who iterates; with stop strings the engine's thread does."""
        return None if self._tokenizer is None or self._stopped is not None else TextStream(self._tokenizer)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self._sequence.prompt_length

    @property
    def done(self) -> bool:
        """True once the request has ended."""
        return not self._outcome.empty()

    # For the engine's thread.

    def deliver(self, token: int) -> bool:
        """Hand out the newest token.   Returns True if its text ends the request."""
        stopped = self._stopped
        self._pieces.put((token, "" if stopped is None else stopped.push(token)))
        self._wake_reader()
        return stopped is not None and stopped.is_stopped

    def end(self, error: BaseException | None = None) -> None:
        """Nothing comes any more."""
        self._error = error
        if error is None and self._stopped is not None and (rest := self._stopped.end()):
            self._pieces.put((-1, rest))
        self._outcome.put(None)
        self._pieces.put(None)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if (notify := self._notify) is not None:
            with suppress(RuntimeError):  # the reader's event loop is closed
                notify()


def _piece(arrived: tuple[int, str], stream: TextStream | None) -> Piece:
    token, text = arrived
    return Piece(token, text if stream is None else stream.push(token))
