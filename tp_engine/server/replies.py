"""The answer to a request: JSON, an error, or a stream of events; and work for a client that may leave before it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tp_engine.api.json_parts import json_parts
from tp_engine.api.openai.errors import HttpError, describe_error
from tp_engine.errors import EngineDeadError
from tp_engine.server.body_budget import NO_ROOM_FOR_BODY
from tp_engine.system.log import get_logger
from tp_engine.system.panics import panics_refused

logger = get_logger(__name__)

Result = TypeVar("Result")
ErrorShape: TypeAlias = Callable[[int, str], dict[str, Any]]  # status and message -> body

_MAY_CHANGE = (408, 429)  # of the client's errors, those that a repeated request may not get again
_ERROR_SHAPE: ContextVar[ErrorShape | None] = ContextVar("error_shape", default=None)

DONE_EVENT = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work``; when the client leaves, cancel it, wait for its end, and raise ``ClientGoneError``.

    Call it after the whole body has been read: from then on ``receive`` returns only at the disconnect.
    """
    task = asyncio.ensure_future(work)

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            with panics_refused("the request cannot be answered"):
                return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def json_reply(
    body: Mapping[str, Any] | Sequence[Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


class PartsReply(Response):
    """A long JSON answer, encoded in parts, which are sent one after the other.  Make it in a thread."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._parts = list(json_parts(body))
        super().__init__(None, 200, {"Content-Length": str(sum(map(len, self._parts)))}, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def shape_errors(shape: ErrorShape) -> None:
    """Use ``shape`` for the bodies of errors of this task's request."""
    _ERROR_SHAPE.set(shape)


def error_reply(error: BaseException) -> Response:
    """The answer to any exception, OpenAI-shaped unless ``shape_errors`` says otherwise.

    Unforeseen ones are logged with their traceback.
    """
    status, body = describe_error(error)
    if (shape := _ERROR_SHAPE.get()) is not None:
        body = shape(status, body["error"]["message"])
    if status == 500:
        logger.error("a request failed: %s", error, exc_info=error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    # The rest of the body would be read as the next request.
    if status in (408, 413, 415) or getattr(error, "code", None) == NO_ROOM_FOR_BODY:
        headers["Connection"] = "close"
    if isinstance(error, HttpError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    # Without it Claude Code silently repeats a request with a wrong key for minutes.
    if status < 500 and status not in _MAY_CHANGE:
        headers["X-Should-Retry"] = "false"
    return json_reply(body, status, headers)


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event; may be called in any thread."""
    return b"".join((b"data: ", *json_parts(body), b"\n\n"))


class EventStream(Response):
    """Server-sent events from a generator.

    The status line waits for the first event, so an error before it becomes an error answer.  After every ``ping_s``
    seconds of silence (0: never) the result of ``ping`` is sent, with the status line if need be: proxies and clients
    close connections on which nothing comes.  An error after the status line becomes the last events, made by
    ``failure``.  When the client leaves, the generator is closed before the connection's task ends.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failure: Callable[[Exception], bytes],
        held: contextlib.ExitStack,
        *,
        ping: Callable[[], bytes],
        ping_s: float,
    ) -> None:
        self._events = events
        self._failure = failure
        self._ping = ping
        self._held = held
        self._ping_s = ping_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send_events(scope, receive, send))

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = _Parts(send)
        try:
            with panics_refused("the stream cannot go on"):
                async with _pinging(parts, self._ping, self._ping_s), contextlib.aclosing(self._events) as events:
                    async for data in events:
                        await parts.send(data)
        except Exception as error:
            if not parts.begun:
                await error_reply(error)(scope, receive, send)
                return
            # The cause of the engine's end has been logged once: its streams are not further errors.
            level = logging.INFO if isinstance(error, EngineDeadError) else logging.ERROR
            logger.log(level, "a stream was cut off: %s", error)
            await parts.send(self._failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Parts:
    """The parts of a streamed answer, with the status line before the first.  Two tasks may send."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self.sent_s = asyncio.get_running_loop().time()
        self._send = send
        self._lock = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Send one part."""
        async with self._lock:
            if not self.begun:
                await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                self.begun = True
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self.sent_s = asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def _pinging(parts: _Parts, ping: Callable[[], bytes], ping_s: float) -> AsyncGenerator[None, None]:
    """Within, a ``ping`` is sent whenever ``ping_s`` seconds have passed without a part."""
    pings = asyncio.ensure_future(_ping(parts, ping, ping_s))
    try:
        yield
    finally:
        pings.cancel()
        await asyncio.gather(pings, return_exceptions=True)


async def _ping(parts: _Parts, ping: Callable[[], bytes], ping_s: float) -> None:
    loop = asyncio.get_running_loop()
    while ping_s > 0:
        await asyncio.sleep(parts.sent_s + ping_s - loop.time())
        if loop.time() >= parts.sent_s + ping_s:
            await parts.send(ping())
