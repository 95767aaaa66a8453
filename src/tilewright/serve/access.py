"""Who may ask, how much, and a count of what was answered: before a body is read."""

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tilewright.serve.failures import body, server_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/health")  # a browser opens the page without a header; the page asks with the key behind its "#"


class Access:
    """ASGI middleware.  401 without the key, 413 for a body over the limit, whether its length was declared or not, and
    500 for what was not expected.
    """

    def __init__(self, app: Application, api_key: str | None, max_body: int, answered: Callable[[int], None]) -> None:
        self._app, self._max_body, self._answered = app, max_body, answered
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        key = headers.get(b"authorization", b"")
        if (
            self._expected is not None
            and scope["path"] not in _OPEN
            and not secrets.compare_digest(key, self._expected)
        ):
            await self._refuse(send, 401, "the API key is missing or wrong: Authorization: Bearer KEY")
            return
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_body:
            await self._refuse(send, 413, f"the request has more than {self._max_body} bytes")
            return
        read, is_refused, is_answered = 0, False, False

        async def limited() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise ValueError("the body is over the limit")
            return message

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal is_refused, is_answered
            if is_refused:
                return
            if message["type"] == "http.response.start":
                if read > self._max_body:  # whatever the application says of the error above
                    is_refused = True
                    await self._refuse(send, 413, f"the request has more than {self._max_body} bytes")
                    return
                self._answered(message["status"])
                is_answered = True
            await send(message)

        try:
            await self._app(scope, limited, counted)
        except Exception as error:  # noqa: BLE001 - uvicorn would log the message, which may quote a prompt
            answer = server_body(error)
            if not (is_answered or is_refused):
                await self._send(send, 500, answer)

    async def _refuse(self, send: Send, status: int, message: str) -> None:
        await self._send(send, status, body(status, message))

    async def _send(self, send: Send, status: int, answer: dict[str, Any]) -> None:
        self._answered(status)
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
