"""A small HTTP client in an event loop: one connection for each request, answers that come in pieces."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tilewright.errors import InputError, ServerError


class Client:
    """A server at `url`, with or without the "/v1" of OpenAI's interface at its end.   Raises InputError for no URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise InputError(f"{url} is no address of a server; write http://127.0.0.1:8000.")
        is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if is_secure else 80)
        self._ssl = ssl.create_default_context() if is_secure else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", "Accept": "*/*"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def get(self, path: str) -> Any:
        """The JSON at `path`.   Raises ServerError."""
        body = b"".join([piece async for piece in self._ask("GET", path, b"")])
        try:
            return json.loads(body)
        except ValueError as error:
            raise ServerError("malformed answer", f"{path} is no JSON: {error}") from error

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The server-sent events that answer a POST, until "[DONE]".   Raises ServerError, also without that end."""
        rest = b""
        async for piece in self._ask("POST", path, json.dumps(body).encode()):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    event = json.loads(data)
                except ValueError as error:
                    raise ServerError("malformed answer", f"an event is no JSON: {error}") from error
                if "error" in event:
                    raise ServerError("error in a stream", _message(data))
                yield event
        raise ServerError("cut off", "the stream ended without [DONE]")

    async def _ask(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The body of a 200 answer, as it comes."""
        writer = None
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
            headers = self._headers | {"Content-Type": "application/json", "Content-Length": str(len(body))}
            head = [f"{method} {self._path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            status, fields = _head(await reader.readuntil(b"\r\n\r\n"))
            if status != 200:
                answer = b"".join([piece async for piece in _body(reader, fields)])
                raise ServerError(f"status {status}", _message(answer))
            async for piece in _body(reader, fields):
                yield piece
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise ServerError("malformed answer", str(error)) from error
        except OSError as error:
            raise ServerError("connection", str(error)) from error
        finally:
            if writer is not None:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()


def _head(text: bytes) -> tuple[int, dict[str, str]]:
    """Status and fields, whose names become small letters."""
    first, *lines = text.decode("latin-1").rstrip("\r\n").split("\r\n")
    fields = (line.partition(":") for line in lines)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
    if fields.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in fields:
        yield await reader.readexactly(int(fields["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


def _message(answer: bytes) -> str:
    """What an answer with an error says, in OpenAI's form or any other."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(answer)["error"]["message"])
    return answer[:200].decode(errors="replace")
