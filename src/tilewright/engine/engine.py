"""Generation for many requests at once: one model, one paged cache, one thread that computes step after step."""

import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequences
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch

from tilewright.engine.adapters import Source
from tilewright.engine.draft import DraftModel
from tilewright.engine.drafter import DeviceDrafter, Drafter, PromptLookup
from tilewright.engine.generation import Generation, Output, Piece
from tilewright.engine.grammar import Grammars, Matcher
from tilewright.engine.inputs import Sizes
from tilewright.engine.loading import load, load_draft
from tilewright.engine.memory import count_pages, longest_context
from tilewright.engine.model import PagedModel
from tilewright.engine.pages import PagePool
from tilewright.engine.params import SamplingParams
from tilewright.engine.prompts import Prompt, check_params, is_tokens, tokens_of
from tilewright.engine.runner import Results, Runner
from tilewright.engine.scheduler import Scheduler
from tilewright.engine.sequence import Sequence, Status
from tilewright.errors import InputError, TilewrightError
from tilewright.generate import checks
from tilewright.log import logger


class Engine:
    """Continuous batching of a Hugging Face decoder over a paged cache.

    model         a transformers model in evaluation mode, patched or not, or the folder of one.
    tokenizer     for prompts and results as text; with a folder, the one that lies in it.
    device, dtype where and how a folder is loaded: by default the GPU if there is one, and the dtype of the checkpoint.
                  On a GPU a model from a folder is patched.
    quantize      a format of `quantize_` for the linear layers of a model from a folder: "int4", "fp8", ...
    max_batch     sequences of one step.
    max_context   tokens of a prompt and its answer together; default: the model's longest, at most 8192.
    cache_tokens  tokens that the cache holds; default: what fits 90 % of the free device memory, or 1 GiB on a CPU, and
                  no more than max_batch * max_context.
    page_size     tokens of a page; prefixes are shared by whole pages.
    step_tokens   tokens of one step, at least max_batch, so that a long prompt does not hold up those that decode.
    graphs        CUDA graphs for steps that only decode: True insists, by default a model that cannot be captured runs
                  without, and one log line says why.
    kv_dtype      torch.float8_e4m3fn: keys and values in one byte, with a scale for each token and head; by default
                  they have the dtype of the model's keys.
    speculation   "prompt_lookup": up to num_draft_tokens tokens that followed the newest ones where they stood before
                  are computed beside them.  Tokens are those without speculation, under penalties, biases and grammars
                  too; requests for other log-probabilities than those of their tokens draft none.  Drafts are of
                  tokens that the host has read, so no step is queued ahead.
    draft_model   instead of `speculation`, a smaller model with the same vocabulary, or its folder, that draws up to
                  num_draft_tokens tokens for the model to compute in one pass.  Tokens are those without it; requests
                  with a grammar draft none, because the host sees no draft.  Its keys and values lie in the same pages.
    adapters      LoRA adapters by name, for requests that name one: folders in the form of PEFT, or pairs of the config
                  and the tensors in such a folder.  Requests of several adapters, and of none, share steps.

    A request's keys and values lie in pages.  Prompts that begin alike share pages; new requests join between steps; a
    prompt is computed in chunks beside the steps of others; where pages are short the youngest request waits and
    computes its pages again.  The thread that computes is one step ahead of what the host has read.

    While the engine lives, call the model through it alone, and leave its modules and weights as they are: graphs hold
    them.

    Greedy tokens are those of `model.generate` up to rounding: products of other sizes add in another order.  Drawn
    tokens depend on prompt, seed and logits alone.  Use as a context manager, or call `close`.
    Raises InputError for models that `PagedModel` does not take, and for sizes that fit no cache.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str = "auto",
        quantize: str | None = None,
        max_batch: int = 64,
        max_context: int | None = None,
        cache_tokens: int | None = None,
        page_size: int = 16,
        step_tokens: int = 2048,
        graphs: bool | None = None,
        kv_dtype: torch.dtype | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = 4,
        draft_model: Any = None,
        adapters: Mapping[str, Source] | None = None,
    ) -> None:
        numbers = {"max_batch": max_batch, "page_size": page_size, "step_tokens": step_tokens}
        for name, value in (numbers | {"num_draft_tokens": num_draft_tokens}).items():
            if value < 1:
                raise InputError(f"Engine: {name} is {value}; it has to be at least 1.")
        if kv_dtype not in (None, torch.float8_e4m3fn):
            raise InputError(f"Engine: kv_dtype is {kv_dtype}; it is None, for that of the model, or float8_e4m3fn.")
        if speculation not in (None, "prompt_lookup"):
            raise InputError(f"Engine: speculation is {speculation!r}; it is None or 'prompt_lookup'.")
        if speculation is not None and draft_model is not None:
            raise InputError("Engine: speculation='prompt_lookup' and draft_model exclude each other; give one.")
        drafts = 0 if speculation is None and draft_model is None else num_draft_tokens
        if isinstance(model, str):
            model, tokenizer = load(model, tokenizer, device, dtype, quantize)
        elif quantize is not None:
            raise InputError(f"Engine: quantize={quantize!r} is for a folder; for this model: quantize_(model, ...).")
        self.tokenizer = tokenizer
        self._model = PagedModel(model)
        self.device = self._model.device
        if graphs and self.device.type != "cuda":
            raise InputError(f"Engine: graphs=True needs a CUDA device; the model is on {self.device}.")
        draft = None if draft_model is None else load_draft(draft_model, self._model, tokenizer, dtype)
        models = [self._model] if draft is None else [self._model, draft]
        self.max_context = longest_context(models, max_context)
        max_pages = -(-self.max_context // page_size)
        pages = count_pages(models, cache_tokens, page_size, kv_dtype, max_batch * max_pages)
        sizes = Sizes(max(step_tokens, max_batch * (1 + drafts)), max_batch, max_pages, drafts)
        self._scheduler = Scheduler(PagePool(pages, page_size), max_batch, sizes.step_tokens, drafts)
        for each in models:
            each.allocate(pages, page_size, kv_dtype)
        self._model.adapt(adapters or {})
        self._runner = Runner(self._model, sizes, graphs, None if draft is None else DraftModel(draft, sizes))
        self._new_drafter: type[Drafter] = PromptLookup if draft is None else DeviceDrafter
        self._stops, _ = checks.special_tokens(model.generation_config, None, None)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._generations: dict[Sequence, Generation] = {}
        self._grammars: Grammars | None = None  # made with the first request that has one
        self._grammars_lock = threading.Lock()
        self._news = threading.Condition()
        self._arrived: list[tuple[Sequence, Generation]] = []
        self._warmups: list[threading.Event] = []
        self._closed = False
        self._failure: BaseException | None = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # weights may have been written on any stream
        self._thread = threading.Thread(target=self._run, name="tilewright-engine", daemon=True)
        self._thread.start()

    # For callers, on any thread.

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Queue one request.

        prompt: text, for which the engine needs a tokenizer, or tokens.
        Raises InputError for an empty prompt, tokens outside of the vocabulary, stop strings without a tokenizer, an
        adapter that is not known, and what fits neither the context nor the cache.  Nothing is queued then.
        """
        params = SamplingParams() if params is None else params
        tokens = tokens_of(prompt, self.tokenizer, self._vocabulary)
        check_params(params, self.tokenizer, self._model.vocabulary)
        if len(tokens) + params.max_tokens > self.room:
            raise InputError(
                f"Engine: {len(tokens)} prompt tokens and {params.max_tokens} new ones exceed the {self.room} of a "
                "request. Shorten the prompt, lower max_tokens, or have a larger max_context and cache_tokens."
            )
        seed = random.getrandbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_tokens) | (frozenset() if params.ignore_eos else frozenset(self._stops))
        may_draft = params.may_draft and (params.grammar is None or self._new_drafter is PromptLookup)
        drafter = self._new_drafter() if self._scheduler.drafts and may_draft else None
        adapter = self._model.adapters.number(params.adapter)
        sequence = Sequence(tokens, params, seed, stops, drafter, self._matcher(params), adapter)
        generation = Generation(sequence, self.tokenizer, self._wake)
        with self._news:
            if self._failure is not None:
                raise InputError(f"Engine: it stopped after an error: {self._failure}. Make another.")
            if self._closed:
                raise InputError("Engine: it is closed.")
            self._arrived.append((sequence, generation))
            self._news.notify()
        return generation

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequences[SamplingParams] | None = None
    ) -> list[Output]:
        """Answer all prompts: one `Output` each, in their order.

        prompts: one, or several.   params: for all, or one for each.
        Raises InputError as `submit`, before anything is queued for a list whose length does not match.
        """
        every: list[Prompt] = [prompts] if isinstance(prompts, str) or is_tokens(prompts) else list(prompts)  # type: ignore[list-item,arg-type]
        each = [params] * len(every) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(every):
            raise InputError(f"Engine: {len(every)} prompts and {len(each)} params; give one for all, or one for each.")
        generations: list[Generation] = []
        try:
            for prompt, its in zip(every, each, strict=True):
                generations.append(self.submit(prompt, its))
            return [generation.result() for generation in generations]
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Answer one prompt piece by piece; leaving the loop early cancels the request."""
        generation = self.submit(prompt, params)
        try:
            yield from generation
        finally:
            if not generation.done:
                generation.cancel()

    def warmup(self) -> float:
        """Capture every CUDA graph of steps that decode; otherwise the first step of a size does.  Returns seconds."""
        begin = perf_counter()
        with self._news:
            if self._closed:
                raise InputError("Engine: it is closed.")
            self._warmups.append(ended := threading.Event())
            self._news.notify()
        ended.wait()
        if self._failure is not None:
            raise TilewrightError(f"Engine: warmup failed: {self._failure}") from self._failure
        return perf_counter() - begin

    def close(self) -> None:
        """End the thread; requests that have not ended are cancelled.  A second call does nothing."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._model.adapters.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """True while requests are taken."""
        return not self._closed

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may name."""
        return self._model.adapters.names

    @property
    def room(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(self.max_context, self._scheduler.pool.pages * self._scheduler.pool.page_size)

    @property
    def statistics(self) -> dict[str, int]:
        """Numbers of this moment: requests that run and wait, pages held and idle; and so far: preemptions, speculated
        tokens, and those of them that were accepted.
        """
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "pages": scheduler.pool.pages,
            "pages_held": scheduler.pool.held,
            "pages_idle": scheduler.pool.idle,
            "preemptions": scheduler.preemptions,
            "draft_tokens": scheduler.draft_tokens,
            "accepted_tokens": scheduler.accepted_tokens,
        }

    # The engine's thread.

    def _run(self) -> None:
        queued: Results | None = None
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode())
                if self.device.type == "cuda":
                    stack.enter_context(torch.cuda.device(self.device))
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
                while self._take_news(wait=queued is None and not self._generations):
                    if queued is not None and self._scheduler.drafts:
                        self._read(queued)
                        queued = None
                    chunks = self._scheduler.plan()
                    following = self._runner.launch(chunks) if chunks else None
                    if queued is not None:
                        self._read(queued)
                    queued = following
        except BaseException as error:  # noqa: BLE001 - it belongs to those who wait for results
            logger.exception("the engine stopped")
            self._failure = error
        self._end_all()

    def _take_news(self, wait: bool) -> bool:
        """Take arrived and cancelled requests; False once the engine is closed.  wait: for any of these."""
        with self._news:
            while wait and not (self._arrived or self._warmups or self._closed):
                self._news.wait()
            if self._closed:
                return False
            arrived, self._arrived = self._arrived, []
        if self._warmups:
            self._runner.capture()
            self._end_warmups()
        for sequence, generation in arrived:
            self._generations[sequence] = generation
            self._scheduler.add(sequence)
        for sequence, generation in list(self._generations.items()):
            if generation.cancelled:
                self._end(sequence, "cancelled")
        return True

    def _read(self, results: Results) -> None:
        """Give the tokens of a step to their sequences."""
        for chunk, (tokens, logprobs), scores in zip(results.chunks, results.read(), results.scores(), strict=True):
            sequence = chunk.sequence
            count = self._scheduler.accept(chunk, tokens)
            if not sequence.take(chunk.start + 1, scores[: chunk.scored]) and sequence.status is not Status.FINISHED:
                self._end(sequence, "failed", FloatingPointError("the model computes NaN behind the prompt's tokens"))
            if chunk.shows_top:
                sequence.top.append(scores[-1].top)
            for token, logprob in zip(tokens[:count], logprobs[:count], strict=True):
                if sequence.status is Status.FINISHED:  # an earlier token ended it
                    break
                self._take(sequence, token, logprob)

    def _take(self, sequence: Sequence, token: int, logprob: float) -> None:
        """Give a token to its sequence, which it may end."""
        if token < 0:
            reason = "the model computes NaN, or logit_bias forbids every token, or a grammar does"
            self._end(sequence, "failed", FloatingPointError(f"no logit is above -inf: {reason}"))
            return
        sequence.read(token, logprob if sequence.params.logprobs else None)
        if sequence.matcher is not None and sequence.matcher.error:
            self._end(sequence, "failed", RuntimeError(f"its grammar: {sequence.matcher.error}"))
            return
        try:
            if sequence.params.max_tokens and self._generations[sequence].deliver(token):
                sequence.reason = "stop"
        except Exception as error:  # noqa: BLE001 - of the tokenizer, which is the caller's
            self._end(sequence, "failed", error)
            return
        if sequence.reason is not None:
            self._end(sequence, sequence.reason)

    def _end(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        generation = self._generations.pop(sequence)
        self._scheduler.finish(sequence, reason)
        generation.end(error)

    def _end_all(self) -> None:
        """The thread ends: cancel what runs and what arrived."""
        with self._news:
            self._closed = True
            self._generations.update(self._arrived)
            self._arrived = []
        for sequence, generation in self._generations.items():
            sequence.status, sequence.reason = Status.FINISHED, "cancelled"
            generation.end(self._failure)
        self._generations.clear()
        self._end_warmups()

    def _end_warmups(self) -> None:
        with self._news:
            ended, self._warmups = self._warmups, []
        for event in ended:
            event.set()

    def _wake(self) -> None:
        with self._news:
            self._news.notify()

    # Set-up.

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.grammar is None:
            return None
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self._vocabulary, sorted(self._stops))
        return self._grammars.matcher(params.grammar)
