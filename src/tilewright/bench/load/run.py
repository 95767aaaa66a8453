"""Sends a load to a server and notes when the tokens of each request came."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from tilewright.bench.load.client import Client
from tilewright.bench.load.workload import Request, Workload
from tilewright.errors import ServerError


@dataclass
class Record:
    """One request.   arrival, sent: seconds after the load began; sent is later where the limit held it back.
    times: seconds from sent to each event with text.   total: to the end.   prompt, output: tokens, as the server
    counted them.   failure: its kind and text, or None.
    """

    arrival: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    total: float = 0.0
    prompt: int = 0
    output: int = 0
    failure: tuple[str, str] | None = None


def measure(
    url: str,
    workload: Workload,
    *,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int | None = None,
    timeout: float = 600.0,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    progress: Callable[[int], object] = lambda ended: None,
) -> tuple[str, list[Record]]:
    """Send `workload` to `url`; returns the model's name and a record of each request, in order of arrival.

    model         for servers of several; default: the first that /v1/models names.
    concurrency   open requests, at most; those that arrive beyond it wait here.   None: no limit.
    timeout       seconds for one request.
    ignore_eos    ask for all tokens.  Servers that do not know the field may refuse it, and end early without it.
    progress      called with the number of ended requests.

    Every request has its own connection, whose making counts as time to the first token.  One request goes ahead,
    unmeasured.   Raises InputError for a URL that is none, ServerError if that first request fails.
    """
    client = Client(url, api_key)
    options = {"temperature": temperature, "stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        options["ignore_eos"] = True

    async def load() -> tuple[str, list[Record]]:
        name = model or await _name(client)
        requests, common = workload.draw(), options | {"model": name}
        first = Record(0.0)
        await _answer(client, requests[0], common, first, perf_counter(), timeout)
        if first.failure is not None:
            raise ServerError(*first.failure)
        limit = asyncio.Semaphore(concurrency or len(requests))
        begin, ended = perf_counter(), 0

        async def one(request: Request) -> Record:
            nonlocal ended
            await asyncio.sleep(begin + request.arrival - perf_counter())
            record = Record(request.arrival)
            async with limit:
                await _answer(client, request, common, record, begin, timeout)
            ended += 1
            progress(ended)
            return record

        return name, list(await asyncio.gather(*map(one, requests)))

    return asyncio.run(load())


async def _name(client: Client) -> str:
    listed = await client.get("/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError("malformed answer", "/v1/models names no model") from None


async def _answer(
    client: Client, request: Request, common: dict[str, Any], record: Record, begin: float, timeout: float
) -> None:
    """Send a request and fill its record."""
    body = common | {"prompt": request.prompt, "max_tokens": request.output, "seed": request.seed}
    sent = perf_counter()
    record.sent, record.prompt = sent - begin, len(request.prompt)
    try:
        async with asyncio.timeout(timeout):
            async for event in client.events("/v1/completions", body):
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    record.times.append(perf_counter() - sent)
                if event.get("usage"):
                    record.prompt = int(event["usage"].get("prompt_tokens", record.prompt))
                    record.output = int(event["usage"].get("completion_tokens", 0))
    except TimeoutError:
        record.failure = "timeout", f"no end after {timeout:g} s"
    except ServerError as error:
        record.failure = error.kind, error.message
    record.total = perf_counter() - sent
    record.output = record.output or len(record.times)
