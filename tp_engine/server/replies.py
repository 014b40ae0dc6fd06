"""Answers: JSON, errors, and event streams that notice a client's leaving in every phase."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tp_engine.api.openai.errors import HttpError, describe_error
from tp_engine.log import get_logger

logger = get_logger(__name__)

Result = TypeVar("Result")
DONE_EVENT = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def json_reply(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_reply(error: BaseException) -> Response:
    """The OpenAI-shaped answer for anything raised while serving; unforeseen errors are logged with their traceback."""
    status, body = describe_error(error)
    if status == 500:
        logger.error("a request failed: %s", error, exc_info=error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status in (408, 413):  # the rest of the body would be taken for the next request
        headers["Connection"] = "close"
    if isinstance(error, HttpError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return json_reply(body, status, headers)


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` and cancel it, waiting for its end, when the client leaves; raises ``ClientGoneError`` then.

    To be used once the whole body has been read: from there on, ``receive`` only ever tells of the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator.

    The status line waits for the first event, so whatever is refused before it is a proper error answer; a later
    failure is an error event, and the stream's end.  Leaving closes the generator before the connection's task ends.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack) -> None:
        self._events = events
        self._held = held
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send_events(scope, receive, send))

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                        started = True
                    await send(_part(data))
        except Exception as error:
            if not started:
                await error_reply(error)(scope, receive, send)
                return
            logger.error("a stream failed: %s", error)
            await send(_part(event(describe_error(error)[1]) + DONE_EVENT))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
