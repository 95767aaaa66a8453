"""What a client is told of a failure, in OpenAI's form, and what the log is told: where it was, never a prompt."""

import json
import traceback
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from tilewright.errors import InputError, TilewrightError
from tilewright.log import logger

_SERVER = "server_error"


class Refusal(Exception):
    """A request that this server does not take now, or at all; becomes an answer with `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Json(JSONResponse):
    """JSON in ASCII: a text with half a surrogate pair, which clients may send, has no bytes in UTF-8."""

    def render(self, content: Any) -> bytes:
        """Bytes of an answer."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def body(status: int, message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The object of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def server_body(error: BaseException) -> dict[str, Any]:
    """The object of a failure that is not the client's.  An unexpected one is logged by its kind and place alone: its
    message may quote a prompt.
    """
    if isinstance(error, TilewrightError):
        return body(500, str(error), _SERVER)
    while isinstance(error, BaseExceptionGroup):  # what several tasks of an answer raised
        error = error.exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    logger.error("a request failed: %s in %s:%s", type(error).__name__, frame.filename, frame.lineno)
    return body(500, f"the server failed with {type(error).__name__}; its log says where.", _SERVER)


def install(app: FastAPI) -> None:
    """Answer to whatever a route raises on purpose."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        fields = (f"{'.'.join(map(str, its['loc'][1:]))}: {its['msg']}" for its in error.errors())
        return Json(body(400, "; ".join(fields)), 400)

    @app.exception_handler(InputError)
    async def wrong(request: Request, error: InputError) -> Response:
        return Json(body(400, str(error)), 400)

    @app.exception_handler(TilewrightError)
    async def failed(request: Request, error: TilewrightError) -> Response:
        return Json(server_body(error), 500)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return Json(body(error.status, str(error)), error.status)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return Json(body(error.status_code, str(error.detail)), error.status_code, error.headers)
