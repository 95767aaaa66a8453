"""Replace `model.generate` of one model by static decoding, call by call, and restore the original on request.

The replacement is an attribute of the instance; class and library stay unchanged. A call is decoded statically if
`StaticDecoder.generate` supports all its settings; any other call (beams, penalties, scores, a cache of the caller)
runs the original `generate`, with one log line that says why.

A model whose step fails or cannot be captured, and a cache that does not fit into memory, are detected once. After that
such calls run the original immediately, until the model changes.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewright.errors import InputError
from tilewright.generate.checks import fingerprint
from tilewright.generate.static import StaticDecoder
from tilewright.log import log_once, logger
from tilewright.models.transformers_names import default_generation_settings

DecoderFactory = Callable[[Any, int, int], StaticDecoder]

# Generation settings we implement; any other setting that differs from its default sends the call to the original.
_HONOURED = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id",
}  # fmt: skip
# Settings that do not change the tokens of a decoder-only model.
_NEUTRAL = {
    "bos_token_id", "cache_implementation", "compile_config", "disable_compile", "transformers_version", "use_cache",
    "_from_model_config",
}  # fmt: skip
_KEPT = 4  # decoders, each with its cache; the least recently used one is dropped
_LENGTH_STEP = 512  # decoders are made for rounded-up lengths, so that a longer prompt seldom needs a new one


def rounded_length(length: int) -> int:
    """The `max_length` of the decoder that serves `length` positions."""
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


class _Failure(NamedTuple):
    """A failure of static decoding.  model: the `fingerprint` at that time.  slots: size of the cache that did not fit,
    or None for a failure of any size.
    """

    model: tuple[object, ...]
    slots: int | None
    reason: str


class Attachment:
    """A model whose `generate` was replaced. `undo()` restores it and frees caches and graphs."""

    def __init__(self, model: Any, factory: DecoderFactory) -> None:
        self._model = model
        self._factory = factory
        self._original = model.generate
        self._replaced = vars(model).get("generate")  # an attachment below this one; None: the class's own
        self._decoders: dict[int, StaticDecoder] = {}
        self._failure: _Failure | None = None
        model.generate = self._generate

    def undo(self) -> None:
        """Give the model its own `generate` back."""
        if vars(self._model).get("generate") == self._generate:
            if self._replaced is None:
                del self._model.generate
            else:
                self._model.generate = self._replaced
        self.forget()

    def forget(self) -> None:
        """Free caches, graphs and compiled steps; the next call makes new ones."""
        self._decoders.clear()

    def decoder(self, batch_size: int, length: int) -> StaticDecoder:
        """The decoder for this batch size, replaced by a longer one when `length` needs it."""
        decoder = self._decoders.pop(batch_size, None)
        if decoder is None or decoder.max_length < length:
            del decoder  # its cache is freed before the longer one is allocated
            while len(self._decoders) >= _KEPT:
                del self._decoders[next(iter(self._decoders))]
            decoder = self._factory(self._model, batch_size, rounded_length(length))
        self._decoders[batch_size] = decoder
        return decoder

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled model decodes statically too, with new decoders."""
        return self.__dict__ | {"_decoders": {}, "_failure": None}

    def _generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        call = None
        try:
            call = _Call(self._model, inputs, generation_config, dict(kwargs))
            if self._failed(call) is None:
                decoder = self.decoder(*call.size)
                return decoder.generate(call.input_ids, call.attention_mask, **call.arguments)
        except InputError as reason:  # raised before the first token, so nothing was streamed yet
            log_once(("generate", str(reason)), f"model.generate runs as the model defines it: {reason}", logging.INFO)
        except Exception as error:
            if call is None or call.streamed:  # the original would stream the tokens again
                raise
            self._remember(call, error)
        # Outside of the handlers: a traceback would keep the decoder's cache
        return self._original(inputs, generation_config, **kwargs)

    def _failed(self, call: "_Call") -> _Failure | None:
        """The earlier failure that rules out static decoding of this call, or None; a changed model forgets it."""
        failure = self._failure
        if failure is not None and failure.model != fingerprint(self._model):
            failure = self._failure = None
        if failure is None or (failure.slots is not None and call.slots < failure.slots):
            return None
        return failure

    def _remember(self, call: "_Call", error: Exception) -> None:
        """Free the decoders, and record why they are not tried again."""
        full = isinstance(error, torch.OutOfMemoryError)
        reason = str(error).partition("\n")[0] or type(error).__name__
        self._decoders.clear()
        self._failure = _Failure(fingerprint(self._model), call.slots if full else None, reason)
        which = f"from {call.slots} positions on (batch times length) " if full else ""
        logger.warning("model.generate runs as the model defines it %sfrom now on: %s", which, reason)
        if full:
            torch.cuda.empty_cache()


def attach_generate(model: Any, decoder_factory: DecoderFactory | None = None) -> Attachment:
    """Make `model.generate` decode with a static cache where it can, and as the model defines it elsewhere.

    A step that cannot be captured and a cache that does not fit give one warning, and are not tried again.
    decoder_factory: (model, batch_size, max_length) -> StaticDecoder; by default a decoder with default options.
    Decoders are made on demand, one a batch size; the last four are kept.
    Returns the attachment; its `undo()` restores the model.
    """
    return Attachment(model, decoder_factory or _default_decoder)


def _default_decoder(model: Any, batch_size: int, max_length: int) -> StaticDecoder:
    return StaticDecoder(model, batch_size=batch_size, max_length=max_length)


class _Call:
    """The arguments of one call for `StaticDecoder`. Raises InputError for settings it does not support."""

    def __init__(self, model: Any, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> None:
        self.input_ids = inputs if inputs is not None else kwargs.pop("input_ids", None)
        self.attention_mask = kwargs.pop("attention_mask", None)
        streamer = kwargs.pop("streamer", None)
        self._streamer = None if streamer is None else _Streamer(streamer)
        ids = self.input_ids
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise InputError("it needs input_ids of shape (B, S)")
        if model.training:
            raise InputError("the model is in training mode")
        settings = _settings(model, generation_config, kwargs)
        new_tokens = _new_tokens(model, settings, ids.shape[1])
        self.size = (ids.shape[0], ids.shape[1] + new_tokens)
        eos, pad = settings["eos_token_id"], settings["pad_token_id"]
        stops = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        if self.attention_mask is None and pad is not None and pad not in stops:
            self.attention_mask = ids.ne(pad)  # as Transformers infers it
        self.arguments = {
            "max_new_tokens": new_tokens,
            "do_sample": bool(settings["do_sample"]),
            "temperature": _or(settings["temperature"], 1.0),
            "top_k": _or(settings["top_k"], 0),
            "top_p": _or(settings["top_p"], 1.0),
            "eos_token_id": stops,
            "pad_token_id": pad,
            "streamer": self._streamer,
        }

    @property
    def slots(self) -> int:
        """Positions of the cache that the call needs."""
        return self.size[0] * self.size[1]

    @property
    def streamed(self) -> bool:
        """True if the caller's streamer received tokens."""
        return self._streamer is not None and self._streamer.used


class _Streamer:
    """The caller's streamer, and whether it received tokens."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self.used = streamer, False

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens to the caller's streamer."""
        self.used = True
        self._streamer.put(value)

    def end(self) -> None:
        """Close the caller's streamer."""
        self._streamer.end()


def _settings(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every setting in force, by Transformers' precedence: the call, the given config, the model's, the defaults.

    InputError names a setting with a value that we do not implement. A None in the call switches its setting off.
    """
    plain = type(model.generation_config)().to_dict()
    plain |= default_generation_settings(model.generation_config)
    settings = dict(plain)
    for config in (model.generation_config, generation_config):
        if config is not None:
            settings |= {name: value for name, value in config.to_dict().items() if value is not None}
    settings |= kwargs
    for name, value in settings.items():
        usual = value is None or value is False or name in _HONOURED or name in _NEUTRAL
        if not usual and (isinstance(value, torch.Tensor) or value != plain.get(name)):
            shown = f"={value!r}" if isinstance(value, bool | int | float | str) else ""
            raise InputError(f"it sets {name}{shown}")
    # The default length counts new tokens, a given one all tokens.
    lengths = [c.max_length for c in (generation_config, model.generation_config) if c is not None]
    if kwargs.get("max_length") is None and not any(lengths):
        settings["max_length"] = None
    return settings


def _new_tokens(model: Any, settings: dict[str, Any], length: int) -> int:
    """Maximum number of new tokens of the call."""
    new: int = _or(settings["max_new_tokens"], 0)
    if not new and settings["max_length"] is not None:
        new = settings["max_length"] - length
    elif not new:
        default = default_generation_settings(model.generation_config)["max_length"]
        new = min(default, _or(getattr(model.config, "max_position_embeddings", None), length + default) - length)
    if new < 1:
        raise InputError("it leaves no room for a new token")
    return new


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
