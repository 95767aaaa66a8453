"""Log-probabilities as OpenAI's clients read them: lists of tokens for completions, a list of objects for chats."""

from collections.abc import Sequence
from typing import Any

from tilewright.engine import Output
from tilewright.engine.text import TextStream

_LEAST = -9999.0  # stands for -inf, which JSON does not have


def completion_logprobs(tokenizer: Any, output: Output, echo: bool) -> dict[str, Any]:
    """tokens, token_logprobs, top_logprobs and text_offset of new tokens, behind those of the prompt under `echo`.

    The first token of a prompt has None.   top_logprobs: text to log-probability of the likeliest tokens and of the
    token itself; None if no alternatives were requested.   text_offset: characters of the decoded text before a token.
    """
    tokens, values = list(output.tokens), list(output.logprobs or ())
    tops: Sequence[Any] | None = output.top_logprobs
    stream, offset, offsets = TextStream(tokenizer), 0, []
    for token in output.prompt + tokens if echo else tokens:
        offsets.append(offset)
        offset += len(stream.push(token))
    if echo:
        tokens, values = output.prompt + tokens, [*(output.prompt_logprobs or ()), *values]
        tops = None if tops is None else [*(output.prompt_top_logprobs or ()), *tops]
    texts = [_text(tokenizer, token) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [_value(each) for each in values],
        "top_logprobs": None
        if tops is None
        else [
            None if top is None else {text: _value(value)} | _by_text(tokenizer, top)
            for top, text, value in zip(tops, texts, values, strict=True)
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Any, output: Output) -> dict[str, Any]:
    """`content`: an object for each new token, with its alternatives."""
    tops = output.top_logprobs or [{} for _ in output.tokens]

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _text(tokenizer, token)
        return {"token": text, "logprob": _value(logprob), "bytes": list(text.encode())}

    return {
        "content": [
            entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top.items()]}
            for token, logprob, top in zip(output.tokens, output.logprobs or (), tops, strict=True)
        ]
    }


def _text(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token])
    return text


def _by_text(tokenizer: Any, top: dict[int, float]) -> dict[str, float | None]:
    """Log-probabilities by text; of tokens with one text the likeliest stays."""
    return {_text(tokenizer, token): _value(logprob) for token, logprob in reversed(top.items())}


def _value(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)
