"""The application: routes, access, limits, errors in OpenAI's form.

No prompt and no answer is logged.  An error of one request is the answer to that request; others go on.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from tilewright.engine import Engine, Generation
from tilewright.errors import InputError
from tilewright.serve import failures, templates
from tilewright.serve.access import Access
from tilewright.serve.answers import Chat, Completion, Envelope, parts, usage
from tilewright.serve.failures import Json, Refusal
from tilewright.serve.logprobs import chat_logprobs, completion_logprobs
from tilewright.serve.metrics import Metrics
from tilewright.serve.protocol import ChatRequest, CompletionRequest, Sampled

_DEFAULT_TOKENS = 16  # of a completion that names no number, as in OpenAI's interface
_PAGE = Path(__file__).with_name("chat.html")


def create_app(
    engine: Engine,
    name: str,
    *,
    api_key: str | None = None,
    max_waiting: int = 1024,
    max_body: int = 4 << 20,
) -> FastAPI:
    """An ASGI application that answers with `engine`, and closes it when the server ends.

    name         of the model, in answers and in /v1/models, beside those of the engine's adapters; requests that name
                 another get a 404.
    api_key      if given, all routes but /health and the page at / want "Authorization: Bearer <key>".
    max_waiting  requests that have not ended, beyond which new ones get a 429.
    max_body     bytes of a request, beyond which it gets a 413.
    Raises InputError for an engine without a tokenizer, and for an adapter with the model's name.
    """
    if engine.tokenizer is None:
        raise InputError("serve: the engine has no tokenizer, so it cannot read texts: Engine(model, tokenizer).")
    if name in engine.adapters:
        raise InputError(f"serve: {name!r} names the model and an adapter; give another name.")
    server = _Server(engine, name, max_waiting)

    @asynccontextmanager
    async def closing(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="tilewright", lifespan=closing, docs_url=None, redoc_url=None)
    app.add_middleware(Access, api_key=api_key, max_body=max_body, answered=server.count)

    failures.install(app)

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse("ok") if engine.is_alive else PlainTextResponse("the engine stopped", 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "tilewright",
            "max_model_len": engine.max_context,
        }
        adapters = [{**entry, "id": adapter, "parent": name} for adapter in engine.adapters]
        return {"object": "list", "data": [entry, *adapters]}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return await asyncio.to_thread(_PAGE.read_text, "utf-8")

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = body.prompts()
        return await server.answer(body, prompts, Completion, request, _DEFAULT_TOKENS, echo=body.echo)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        tokens = templates.tokens_of(engine.tokenizer, name, body)
        room = max(engine.room - len(tokens), 1)
        return await server.answer(body, [tokens], Chat, request, room)

    return app


class _Server:
    """One engine behind one name."""

    def __init__(self, engine: Engine, name: str, max_waiting: int) -> None:
        self.engine, self.name, self.max_waiting = engine, name, max_waiting
        self.metrics = Metrics(engine)
        self._open = 0

    def count(self, status: int) -> None:
        """A request was answered."""
        self.metrics.requests.labels(str(status)).inc()

    async def answer(
        self,
        body: Sampled,
        prompts: Sequence[str | list[int]],
        form: type[Completion] | type[Chat],
        request: Request,
        default_tokens: int,
        echo: bool = False,
    ) -> Response:
        """Answer all prompts, whole or streamed.   echo: behind the prompt's own text."""
        names = self.name, *self.engine.adapters
        if body.model is not None and body.model not in names:
            raise Refusal(404, f"no model is named {body.model}; this server has {', '.join(names)}.")
        body.check()
        adapter = None if body.model == self.name else body.model
        params = [replace(its, adapter=adapter) for its in body.params(default_tokens)]
        if body.stream and (params[0].logprobs or echo):
            raise InputError("logprobs and echo come with whole answers alone; leave out stream.")
        count = len(prompts) * len(params)
        if count > self.max_waiting:
            raise InputError(f"{len(prompts)} prompts with n={len(params)} are {count} answers, of {self.max_waiting}.")
        if self._open + count > self.max_waiting:
            raise Refusal(429, f"{self._open} requests are waiting, of {self.max_waiting}; try again later.")
        self._open += count
        generations: list[Generation] = []
        try:
            for prompt, its in product(prompts, params):
                if its.grammar is None:
                    generations.append(self.engine.submit(prompt, its))
                else:  # to compile one takes a while
                    generations.append(await asyncio.to_thread(self.engine.submit, prompt, its))
                self.metrics.prompt_tokens.inc(generations[-1].prompt_length)
        except BaseException:
            self._open -= count
            _cancel(generations)
            raise
        envelope = Envelope(form, adapter or self.name)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._events(envelope, generations, with_usage)
            return _Stream(events, partial(self._close, generations))
        echoed = [self._text(prompt) for prompt, _ in product(prompts, params)] if echo else None
        answer = asyncio.ensure_future(self._whole(envelope, generations, params[0].logprobs, echoed))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Refusal(499, "the client is gone.")
            return Json(answer.result())
        finally:
            answer.cancel()
            gone.cancel()
            self._close(generations)

    async def _whole(
        self,
        envelope: Envelope,
        generations: Sequence[Generation],
        logprobs: bool,
        echoed: Sequence[str] | None,
    ) -> dict[str, Any]:
        async def choice(index: int, generation: Generation) -> dict[str, Any]:
            text, reason = "" if echoed is None else echoed[index], None
            async for part in parts(generation, self.metrics):
                text += part.text
                reason = part.reason
            values = self._logprobs(envelope, generation, echoed is not None) if logprobs else None
            return envelope.form.choice(index, text, reason, values)

        choices = await asyncio.gather(*(choice(index, each) for index, each in enumerate(generations)))
        return envelope.whole(list(choices), await asyncio.to_thread(usage, generations))

    def _logprobs(self, envelope: Envelope, generation: Generation, echo: bool) -> dict[str, Any]:
        output = generation.result()
        if envelope.form is Chat:
            return chat_logprobs(self.engine.tokenizer, output)
        return completion_logprobs(self.engine.tokenizer, output, echo)

    def _text(self, prompt: str | list[int]) -> str:
        text: str = (
            prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(prompt, skip_special_tokens=True)
        )
        return text

    async def _events(
        self, envelope: Envelope, generations: Sequence[Generation], with_usage: bool
    ) -> AsyncIterator[bytes]:
        """Server-sent events; those of several prompts as they come."""
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        async def read(index: int, generation: Generation) -> None:
            try:
                async for part in parts(generation, self.metrics):
                    queue.put_nowait((index, part))
            except Exception as error:  # noqa: BLE001 - of one answer: it is told, and others go on
                queue.put_nowait((index, error))

        readers = [asyncio.ensure_future(read(index, each)) for index, each in enumerate(generations)]
        running = len(readers)
        try:
            while running:
                index, part = await queue.get()
                if isinstance(part, Exception):
                    yield _event(failures.server_body(part))
                    running -= 1
                    continue
                running -= part.reason is not None
                yield _event(envelope.chunk([envelope.form.chunk_choice(index, part.text, part.reason)]))
            if with_usage:
                yield _event(envelope.chunk([], await asyncio.to_thread(usage, generations)))
            yield b"data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()

    def _close(self, generations: Sequence[Generation]) -> None:
        """Requests have been answered, or their client is gone."""
        self._open -= len(generations)
        _cancel(generations)


class _Stream(StreamingResponse):
    """Server-sent events.  `ended` is called once, also if the client was gone before the first."""

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def _cancel(generations: Sequence[Generation]) -> None:
    for generation in generations:
        if not generation.done:
            generation.cancel()


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
