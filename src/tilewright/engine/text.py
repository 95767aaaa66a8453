"""Text of tokens that come one at a time."""

from collections.abc import Sequence
from typing import Any


class TextStream:
    """New text of each token.  Bytes of a character that is not whole yet wait for the rest of it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._from = 0  # text before this token is out, and tokens before it are no context of later ones
        self._shown = 0  # characters out of the text from there

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._tokens.append(token)
        text = self._text()
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[self._shown :], len(text)
        if len(self._tokens) - self._from > 16 and text.endswith((" ", "\n")):
            self._from, self._shown = len(self._tokens) - 1, 0
            self._shown = len(self._text())
        return new

    def end(self) -> str:
        """What waits, with a replacement character for what never became whole."""
        text = self._text()
        new, self._shown = text[self._shown :], len(text)
        return new

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=True)
        return text


class StoppedText:
    """Text of tokens up to the first stop string; what may be the beginning of one waits.

    stops: not empty.   includes_stop: the text ends behind the stop string rather than before it.
    free: tokens whose text is not searched.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], includes_stop: bool, free: int) -> None:
        self._stream, self._stops, self._includes_stop, self._free = TextStream(tokenizer), stops, includes_stop, free
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The text that `token` releases; may be empty."""
        self._free -= 1
        new = self._stream.push(token)
        return self._release(new) if self._free >= 0 else self._search(new)

    def end(self) -> str:
        """What waits, when no token comes any more."""
        if self.is_stopped:
            return ""
        new = self._search(self._stream.end())
        return new if self.is_stopped else new + self._release("")

    def _search(self, new: str) -> str:
        self._held += new
        # Of stop strings that begin at one place, the shortest was complete first
        places = [(start, len(stop)) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            start, length = min(places)
            return self._cut(start + length if self._includes_stop else start)
        return self._cut(len(self._held) - beginning(self._held, self._stops))

    def _release(self, new: str) -> str:
        self._held += new
        return self._cut(len(self._held))

    def _cut(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        self.text += released
        return released


def beginning(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of `text` with which some stop string begins."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)
