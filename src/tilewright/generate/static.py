"""Decoding with a static cache; on a GPU, one CUDA-graph replay a token.

At batch 1 a token of an 8-billion-parameter bf16 model needs its weights read once: 15.0 GB, 3.6 ms at 4.2 TB/s.
Launched from Python the same step takes 40 ms, because a thousand small launches cost the host more than the GPU. So
the whole step, from token to next token, is captured once: it reads its token, position and masks from device
buffers, advances them itself, writes the chosen token where the next replay reads it, and appends it to the sequence.
The host only replays, and reads small reports with a delay of one (`readback`).

What a captured Llama step launches a layer, with `tilewright.patch` and merged projections: 2 norms, 4 matrix-vector
products, rope, a cache write, attention and its sum of parts, gate times up, a residual sum: 12. Unpatched: about 40.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from tilewright.errors import InputError
from tilewright.generate import checks, masks
from tilewright.generate.attention import attention_of, decoder_config, prefer_fast_sdpa, resolve
from tilewright.generate.cache import SlotCache
from tilewright.generate.graphs import StepGraphs
from tilewright.generate.readback import Progress, Readback
from tilewright.generate.sampling import Sampling, TokenSelector
from tilewright.generate.state import DecodeState
from tilewright.log import logger

_BUCKET = 512  # dense attention reads whole buckets of the cache; one graph each
_REPORT_EVERY = 4  # steps between reports: at most 7 spare steps after the last end-of-text


class StaticDecoder:
    """Greedy and sampled decoding for a Hugging Face causal language model.

    max_length: prompt and new tokens together. batch_size: rows of every call. attention: see `generate.attention`;
    "auto" is `fmha_decode` on a GPU and torch's SDPA elsewhere. graphs: None captures on a CUDA device.

    Memory: the cache, 2 * layers * B * H_kv * max_length * D values (Llama-3.1-8B, bf16, B 1: 0.13 MB a position);
    sliding layers keep only their window. A graph keeps addresses: when modules changed class or tensors moved, the
    next call notices and captures again; after any other change of the model call `reset()`. One call at a time.

    Raises InputError for a model without this contract: `input_ids`, `position_ids` and `past_key_values` in forward, a
    language-model head, layers of full or sliding attention, all parameters on one device, evaluation mode.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        batch_size: int = 1,
        attention: str = "auto",
        graphs: bool | None = None,
    ) -> None:
        self._allocate_state(model, max_length, batch_size, attention)
        if graphs and self.device.type != "cuda":
            raise InputError(f"graphs=True needs a CUDA device; the model is on {self.device}")
        self._select = TokenSelector(self.device)
        self._readback = Readback(self._state.report)
        self._fingerprint: tuple[object, ...] = ()
        on_gpu = self.device.type == "cuda"
        self._call_done = torch.cuda.Event() if on_gpu else None
        self._streams: dict[int, torch.cuda.Stream] = {}
        if self._call_done is not None:  # this stream fills the buffers above
            self._order(torch.cuda.current_stream(self.device))
        self._graphs = StepGraphs(self.device, self._select.generator) if on_gpu and graphs is not False else None

    def _allocate_state(self, model: Any, max_length: int, batch_size: int, attention: str) -> None:
        """Set everything that prompts and steps read and write, without streams, graphs or generators."""
        if max_length < 2 or batch_size < 1:
            raise InputError(f"max_length must be >= 2 and batch_size >= 1, got {max_length} and {batch_size}")
        self.model = model
        self.max_length = max_length
        self.batch_size = batch_size
        self.device = checks.device_of(model)
        self.attention = resolve(model, attention, self.device)
        self._last_only = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        )
        self._dtype: torch.dtype | None = None
        self._layer_types: Sequence[str] | None = getattr(decoder_config(model), "layer_types", None)
        self._by_row = self.attention == "split_kv"
        self._cache = SlotCache(
            model.config, max_length=max_length, batch_size=batch_size, device=self.device, by_row=self._by_row
        )
        self._state = DecodeState(self._cache.cursor, batch_size, max_length)

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Read a prompt into the cache. input_ids: (B, S) int64 -> logits of the last token (B, V).

        attention_mask: (B, S), zeros on the left for padding; anything else is an InputError. Without padding no mask
        is built and attention runs causal, through cuDNN where torch has it.
        """
        with self._session():
            return _copy(self._prefill(input_ids, attention_mask))

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        streamer: Any = None,
    ) -> torch.Tensor:
        """Continue prompts: (B, S) -> (B, S + new) int64, as `model.generate` returns it.

        eos_token_id: None takes the model's generation config, () never stops. A finished row continues with
        pad_token_id, by default the first end-of-text token. temperature, top_k, top_p: used with do_sample; top_k=0
        keeps all tokens. generator: its state is used and advanced; seed: a fresh state; neither: seeded from torch's
        global generator. streamer: `put` receives the prompt and then each step's tokens on the host, `end` closes it.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {max_new_tokens}; prefill() gives logits alone")
        sampling = Sampling(temperature, top_k, top_p) if do_sample else None
        with self._session():
            length = self._check(input_ids, max_new_tokens)
            specials = checks.special_tokens(self.model.generation_config, eos_token_id, pad_token_id)
            self._state.load_special_tokens(*specials)
            self._prepare(length, max_new_tokens, sampling)
            if sampling is not None:
                self._select.seed(seed, generator)
            self._state.commit(self._choose(self._prefill(input_ids, attention_mask)))
            progress = Progress(self._readback, input_ids, streamer)
            every = _REPORT_EVERY if self._graphs is not None and streamer is None else 1
            length = self._decode(length, max_new_tokens - 1, progress, every)
            if sampling is not None and generator is not None:
                generator.set_state(self._select.generator.get_state())
            return _copy(self._state.sequence[:, :length])

    def prepare(
        self,
        prompt_length: int,
        max_new_tokens: int,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
    ) -> float:
        """Capture every graph that such a call needs; `generate` otherwise does it first. Returns seconds."""
        begin = perf_counter()
        with self._session():
            self._prepare(prompt_length, max_new_tokens, Sampling(temperature, top_k, top_p) if do_sample else None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter() - begin

    def reset(self) -> None:
        """Forget captured graphs; the next call captures again."""
        if self._graphs is not None:
            self._graphs.clear()

    @property
    def cache_bytes(self) -> int:
        """Bytes held by keys and values; 0 before the first call."""
        return self._cache.nbytes

    # One step ---------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One step, from a token to the next: a graph records it."""
        self._cache.cursor.prefilling = False
        self._cache.cursor.locate()
        with attention_of(self.model, self.attention), prefer_fast_sdpa(self.device, padded=False):
            logits = self._forward(self._state.tokens, self._masks(), self._state.position_ids)
        self._state.commit(self._choose(logits))

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        return self._select(logits)

    def _forward(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
            **self._last_only,
        )
        return output.logits[:, -1]

    def _masks(self) -> Any:
        """One mask, or one by layer type where the config lists types: the forms that Transformers' generate uses."""
        if self._layer_types is None:
            return self._mask(self._cache.layers[0].window)
        windows = {"full_attention": None, "sliding_attention": self._cache.window}
        return {kind: self._mask(windows[kind]) for kind in dict.fromkeys(self._layer_types)}

    def _mask(self, window: int | None) -> torch.Tensor:
        cursor = self._cache.cursor
        if self._by_row:
            return masks.lengths(cursor, window)
        capacity = self.max_length if window is None else cursor.ring or self.max_length
        assert self._dtype is not None  # set by the first prompt
        return masks.additive(cursor, window, capacity=capacity, dtype=self._dtype)

    def _visible(self, position: int) -> int:
        """Number of slots that attention reads at `position`; split-KV takes all and reads lengths on the device."""
        if self._by_row:
            return self.max_length
        bucket = _BUCKET if self._graphs is not None else 1
        return min(-(-(position + 1) // bucket) * bucket, self.max_length)

    # A whole call -----------------------------------------------------------------------------------------------------

    def _check(self, input_ids: torch.Tensor, new_tokens: int) -> int:
        return checks.prompt_length(
            input_ids, new_tokens, batch=self.batch_size, room=self.max_length, device=self.device
        )

    def _shortest_prompt(self) -> torch.Tensor:
        """A prompt of one token that allocates the cache; its logits are not used."""
        return torch.zeros(self.batch_size, 1, dtype=torch.int64, device=self.device)

    def _prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        self._check(input_ids, 0)
        mask, position_ids = self._state.start(input_ids, attention_mask)
        dtype = self.model.get_input_embeddings().weight.dtype
        if dtype != self._dtype:
            self._cache.release()
            self._dtype = dtype
        if not self._by_row:  # split-KV reads no slot behind a length
            self._cache.clear()
        self._cache.cursor.prefilling = True
        with prefer_fast_sdpa(self.device, padded=mask is not None):
            return self._forward(input_ids, mask, position_ids)

    def _prepare(self, prompt_length: int, max_new_tokens: int, sampling: Sampling | None) -> None:
        """Set the selector, and have a graph for every step from `prompt_length` on."""
        self._select.load(sampling)
        if self._graphs is None:
            return
        now = checks.fingerprint(self.model)
        if now != self._fingerprint:
            if len(self._graphs):
                logger.info("the model changed since its decode step was captured; capturing again")
            self._graphs.clear()
            # Allocate the cache on the caller's stream, not on the one that captures.
            self._prefill(self._shortest_prompt(), None)
            self._fingerprint = checks.fingerprint(self.model)  # includes the float8 weights that the first call makes
        for visible in dict.fromkeys(map(self._visible, range(prompt_length, prompt_length + max_new_tokens - 1))):
            key = (self._select.key, visible)
            if key not in self._graphs:
                self._cache.cursor.visible = visible
                self._graphs.capture(key, self._step, self._state.rewind)

    def _decode(self, position: int, steps: int, progress: Progress, every: int) -> int:
        """Queue up to `steps` steps from `position` on, a report every `every` steps. Returns the sequence's length."""
        progress.post()
        for step in range(steps):
            self._cache.cursor.visible = self._visible(position + step)
            if self._graphs is None:
                self._step()
            else:
                self._graphs.replay((self._select.key, self._cache.cursor.visible))
            if (step + 1) % every == 0 or step + 1 == steps:
                progress.post()
                if not progress.running:
                    break
        return progress.finish()

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Inference mode on the model's device, after the work that the last call queued on another stream."""
        if self.model.training:
            raise InputError("the model is in training mode; call model.eval() before decoding")
        if self._call_done is None:
            with torch.inference_mode():
                yield
            return
        with torch.inference_mode(), torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._call_done)
            try:
                yield
            finally:
                self._order(stream)

    def _order(self, stream: torch.cuda.Stream) -> None:
        """Make the next call, and every stream whose memory the decoder may free, wait for `stream`."""
        assert self._call_done is not None
        self._call_done.record(stream)
        for handle, other in self._streams.items():
            if handle != stream.cuda_stream:
                other.wait_event(self._call_done)
        self._streams[stream.cuda_stream] = stream


def _copy(result: torch.Tensor) -> torch.Tensor:
    """A copy that later calls do not overwrite; an ordinary tensor also in inference mode."""
    with torch.inference_mode(False):
        return result.clone()
