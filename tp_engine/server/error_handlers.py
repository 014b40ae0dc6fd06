"""The one shape of every error that a route raises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.server.replies import ClientGoneError, error_reply

_CLIENT_GONE = 499


def add_error_handlers(app: FastAPI) -> None:
    """Answer what is raised with ``{"error": {...}}``."""
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ClientGoneError: _gone,
        ClientDisconnect: _gone,
        RequestError: _refused,
        HttpError: _refused,
        EngineDeadError: _refused,
        Exception: _refused,
        HTTPException: _unknown_route,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _refused(_request: Request, error: Exception) -> Response:
    return error_reply(error)


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    texts = {404: f"there is no {where}", 405: f"{where} is not allowed here"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    reply = error_reply(HttpError(error.status_code, texts.get(error.status_code, str(error.detail)), code=code))
    reply.headers.update(error.headers or {})
    return reply
