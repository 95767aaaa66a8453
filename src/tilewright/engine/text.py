"""Text of tokens that come one at a time."""

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
