"""What a request asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from tilewright.engine.grammar import Grammar
from tilewright.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    temperature   0 takes the likeliest token.
    top_k         keep the k largest logits; 0 keeps all.
    top_p         keep the likeliest tokens of this probability, in (0, 1].
    min_p         keep probabilities of at least min_p times the largest, in [0, 1].
    seed          the same seed and prompt give the same tokens, whatever else runs; None: a fresh seed.

    repetition_penalty  divides positive logits of tokens of prompt and answer, and multiplies negative ones; above 0.
    presence_penalty    subtracted from the logits of tokens of the answer.
    frequency_penalty   subtracted once for each time that a token is in the answer.
    logit_bias          added to the logits of these tokens after the penalties; -inf forbids a token.

    max_tokens    new tokens, the last of which may be an end-of-text token; 0 with prompt_logprobs alone.
    min_tokens    new tokens before the request may end: until then stop tokens are forbidden, and the text of these
                  tokens is not searched for stop strings.
    stop_tokens   further tokens that end the request, beside those of the model's generation config.
    stop          texts that end the request, one or several, for which the engine needs a tokenizer.  The text of the
                  answer ends before the first of them; its tokens are all that were read until then.
    include_stop_str_in_output   the text of the answer ends behind that stop string.
    ignore_eos    go on after the model's end-of-text tokens.
    logprobs      also return log-probabilities of the drawn tokens in softmax(logits), before penalties and bias.
    prompt_logprobs  also return those of the prompt's tokens, each behind the tokens before it.  Such a prompt is
                  computed as a whole: no prefix of it is taken from the cache.
    top_logprobs  with either of the two also return the likeliest tokens and theirs, in [0, 20].  A step that draws
                  with alternatives runs without a CUDA graph.
    grammar       what the answer has to keep to; not with logprobs, whose softmax knows no grammar.  The engine draws
                  such a request in every second step, without a CUDA graph.
    adapter       name of the LoRA adapter of the engine that changes the model for this request; None: the model.

    Raises InputError for values outside of these ranges.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    grammar: Grammar | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        wrong = {
            "temperature": (self.temperature, "at least 0", 0 <= self.temperature < inf),
            "top_k": (self.top_k, "from 0, which keeps all tokens, to 2^31 - 1", 0 <= self.top_k < 1 << 31),
            "top_p": (self.top_p, "in (0, 1]; 1 keeps all tokens", 0 < self.top_p <= 1),
            "min_p": (self.min_p, "in [0, 1]", 0 <= self.min_p <= 1),
            "max_tokens": (self.max_tokens, "at least 1", self.max_tokens >= (not self.prompt_logprobs)),
            "top_logprobs": (self.top_logprobs, "in [0, 20]", 0 <= self.top_logprobs <= 20),
            "min_tokens": (self.min_tokens, "from 0 to max_tokens", 0 <= self.min_tokens <= self.max_tokens),
            "repetition_penalty": (self.repetition_penalty, "above 0", 0 < self.repetition_penalty < inf),
            "presence_penalty": (self.presence_penalty, "finite", -inf < self.presence_penalty < inf),
            "frequency_penalty": (self.frequency_penalty, "finite", -inf < self.frequency_penalty < inf),
            "stop": (self.stop, "texts that are not empty", all(self.stops) and self.stop != ""),
            "logit_bias": (self.logit_bias, "below inf", all(bias < inf for bias in self.logit_bias.values())),
        }
        for name, (value, allowed, is_right) in wrong.items():
            if not is_right:
                raise InputError(f"SamplingParams: {name} is {value!r}; it has to be {allowed}.")
        if self.top_logprobs and not (self.logprobs or self.prompt_logprobs):
            raise InputError("SamplingParams: top_logprobs needs logprobs=True, prompt_logprobs=True, or both.")
        if self.grammar is not None and self.logprobs:
            raise InputError("SamplingParams: logprobs=True and a grammar exclude each other.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InputError(f"SamplingParams: seed is {self.seed}; it has to fit 64 bits.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def changes_logits(self) -> bool:
        """Some logits are not the model's, at some time."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias or self.min_tokens)

    @property
    def may_draft(self) -> bool:
        """Tokens may be speculated: no logits are wanted beside those of draws."""
        return not (self.top_logprobs or self.prompt_logprobs)
