"""Answers that keep to a grammar: a mask over the vocabulary for each draw, by the library llguidance.

The mask of a draw depends on the token before it, so a request with a grammar is left out of the step that is planned
before that token is read: it draws in every second step, while others go on in all.  Drafts that the host makes are
tokens that it knows: the matcher goes along them and back, and gives each draw behind one a mask of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.log import logger


@dataclass(frozen=True)
class Grammar:
    """What an answer may be.

    kind   "json_schema", "regex" (of the whole answer, in Rust's syntax) or "lark" (in the form of llguidance).
    text   the schema as JSON, the expression, or the grammar.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Matcher:
    """The state of one answer.

    error: why no token can be drawn, or "".   is_over: nothing may follow, or the end of text was drawn.
    What the matcher raises ends its own request: from there its masks allow nothing.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._words = matcher, -(-vocabulary // 32)

    def accept(self, token: int) -> None:
        """Take the token that was drawn."""
        self._matcher.consume_token(token)

    def allowed(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Drafts before the first that may not be drawn in its place, or behind which nothing may be drawn."""
        count = 0
        for draft in drafts[: self._matcher.validate_tokens(list(drafts))]:
            self._matcher.consume_token(draft)
            count += 1
            if self.is_over:
                break
        its = tuple(drafts[: count - self.is_over])
        self._matcher.rollback(count)
        return its

    def masks(self, drafts: Sequence[int]) -> list[Tensor]:
        """A mask for the next draw, and for that behind each of `drafts`, which are `allowed`.

        (V / 32,) int32, bit i % 32 of word i // 32 allows token i.
        """
        try:
            masks = [self._mask()]
            for draft in drafts:
                self._matcher.consume_token(draft)
                masks.append(self._mask())
            self._matcher.rollback(len(drafts))
        except Exception:  # noqa: BLE001 - of a library, and it must end no other request
            logger.exception("a request fails: its grammar gave no mask")
            return [torch.zeros(self._words, dtype=torch.int32)] * (1 + len(drafts))
        return masks

    @property
    def error(self) -> str:
        text: str = self._matcher.get_error()
        return text

    @property
    def is_over(self) -> bool:
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def _mask(self) -> Tensor:
        its = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)[: self._words]
        mask = torch.zeros(self._words, dtype=torch.int32)
        mask[: len(its)] = its
        return mask


class Grammars:
    """Makes matchers for one tokenizer, a fast one of transformers.   vocabulary: logits of a row.   ends: tokens that
    end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        """Take about a second for a large vocabulary.   Raises InputError without llguidance or such a tokenizer."""
        if find_spec("llguidance") is None:
            raise InputError("Engine: a grammar needs llguidance: pip install 'tilewright[grammar]'.")
        from llguidance.hf import from_tokenizer

        self._vocabulary = vocabulary
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(ends) or None)
        except ValueError as error:
            raise InputError(f"Engine: a grammar cannot be applied with this tokenizer: {error}.") from error

    def matcher(self, grammar: Grammar) -> Matcher:
        """Raises InputError for a grammar that is wrong, or that llguidance does not take."""
        from llguidance import LLMatcher

        match grammar.kind:
            case "json_schema":
                compiled = LLMatcher.grammar_from_json_schema(_schema(grammar.text))
            case "regex":
                compiled = LLMatcher.grammar_from_regex(grammar.text)
            case "lark":
                compiled = LLMatcher.grammar_from_lark(grammar.text)
            case _:
                raise InputError(f"Engine: a grammar is a json_schema, a regex or lark; {grammar.kind!r} is none.")
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0)
        if matcher.is_error():
            raise InputError(f"Engine: the grammar is refused: {matcher.get_error()}")
        return Matcher(matcher, self._vocabulary)


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InputError(f"Engine: the schema of a grammar is no JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise InputError("Engine: the schema of a grammar is no JSON object.")
    return schema


def json_object() -> Grammar:
    """Any JSON object."""
    return Grammar("json_schema", json.dumps({"type": "object"}))


def apply(logits: Tensor, masks: Mapping[int, Tensor]) -> Tensor:
    """Return logits (B, V) with -inf for what the mask of a row, (V / 32,) int32, does not allow."""
    if not masks:
        return logits
    rows = torch.tensor(list(masks), device=logits.device)
    words = torch.stack(list(masks.values())).to(logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, float("-inf")))
