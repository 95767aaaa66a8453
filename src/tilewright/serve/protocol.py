"""What clients may send, and what the engine makes of it.

Fields of OpenAI's interface that change an answer and that the engine does not apply are refused by name; others are
ignored, so that clients of other servers work.
"""

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tilewright.engine import Grammar, SamplingParams
from tilewright.engine.grammar import json_object
from tilewright.errors import InputError

_NOT_APPLIED: dict[str, tuple[Any, ...]] = {  # field: values that change nothing
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "top_logprobs": (None, 0),  # of a completion, whose number is `logprobs`
}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class JsonSchema(BaseModel):
    """The schema of a response format; name, description and `strict` change nothing."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What kind of text an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """The grammar; None for any text."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InputError("response_format is json_schema, and names no json_schema.")
            return Grammar("json_schema", json.dumps(self.json_schema.schema_))
        return json_object() if self.type == "json_object" else None


class Sampled(BaseModel):
    """Fields that both kinds of requests have."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Raise InputError for a field that the engine would not apply."""
        for name, allowed in _NOT_APPLIED.items():
            value = (self.model_extra or {}).get(name)
            if value not in allowed:
                raise InputError(f"{name} is {value!r}; this server does not apply it. Leave it out.")

    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer; they are not part of it."""
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in texts:
            raise InputError("stop: an empty text would end every answer.")
        return texts

    def params(self, default_tokens: int) -> list[SamplingParams]:
        """The engine's parameters of each of the `n` answers to a prompt; their seeds count up from the given one.

        default_tokens: where the request names no number.
        """
        first = SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            max_tokens=default_tokens if self.max_tokens is None else self.max_tokens,
            stop_tokens=tuple(self.stop_token_ids or ()),
            stop=self.stops(),
            ignore_eos=self.ignore_eos,
            grammar=self.grammar(),
            **self.scores(),
        )
        return [replace(first, seed=None if self.seed is None else self.seed + index) for index in range(self.n)]

    def grammar(self) -> Grammar | None:
        """What the answer has to keep to; `guided_regex` is a field of other servers."""
        grammar = None if self.response_format is None else self.response_format.grammar()
        if self.guided_regex is None:
            return grammar
        if grammar is not None:
            raise InputError("response_format and guided_regex exclude each other.")
        return Grammar("regex", self.guided_regex)

    def scores(self) -> dict[str, Any]:
        """Which log-probabilities the engine has to compute."""
        raise NotImplementedError


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    def scores(self) -> dict[str, Any]:
        """The prompt's log-probabilities with `echo`."""
        if self.max_tokens == 0 and not self.echo:
            raise InputError("max_tokens is 0, which echo=true alone takes.")
        of_prompt = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        return {
            "logprobs": self.logprobs is not None,
            "top_logprobs": self.logprobs or 0,
            "prompt_logprobs": of_prompt,
        }

    def prompts(self) -> list[str | list[int]]:
        """One prompt, or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InputError("prompt is empty.")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Message(BaseModel):
    """A turn of a chat; what a chat template reads beside role and content is handed on."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None

    def scores(self) -> dict[str, Any]:
        """Those of the answer."""
        return {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs or 0}
