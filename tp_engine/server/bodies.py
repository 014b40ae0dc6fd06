"""The body of a request, read within its limits, and of an answer: JSON, an error, or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tp_engine.api.openai.errors import HttpError, describe_error
from tp_engine.api.openai.protocol import parse_body
from tp_engine.api.preparing import LARGE
from tp_engine.errors import RequestError, shown
from tp_engine.log import get_logger
from tp_engine.server.config import ServerConfig

if TYPE_CHECKING:
    from tp_engine.server.state import ServerState

logger = get_logger(__name__)

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
DONE_EVENT = b"data: [DONE]\n\n"
_NUM_BYTES = "num_body_bytes"  # of the request, in its scope's state
_PING = b": ping\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def read_body(kind: type[Body], request: Request, state: ServerState) -> Body:
    """The whole body, parsed; raises ``RequestError`` for a bad one, and what ``read_data`` does."""
    return await parsed(kind, await read_data(request, state.config), request, state)


async def parsed(kind: type[Body], data: bytes, request: Request, state: ServerState) -> Body:
    """``parse_body`` of ``data``, in a thread if it is large."""
    request.scope["state"][_NUM_BYTES] = len(data)
    if len(data) <= LARGE:
        return parse_body(kind, data)
    return await until_disconnect(request.receive, state.preparing.parse(len(data), parse_body, kind, data))


async def in_thread(
    request: Request, state: ServerState, function: Callable[..., Result], *arguments: Any, **named: Any
) -> Result:
    """Call ``function`` in a thread for requests of this size; ``ClientGoneError`` if the client leaves meanwhile.

    If it leaves before its turn, the call is dropped.
    """
    size: int = request.scope["state"][_NUM_BYTES]
    return await until_disconnect(request.receive, state.preparing.run(size, function, *arguments, **named))


def query_choice(request: Request, name: str, values: Mapping[str, Result], default: str) -> Result:
    """What a query parameter means, in any case of letters; ``RequestError`` for a text that is not in ``values``."""
    text = request.query_params.get(name, default)
    if text.lower() not in values:
        raise RequestError(f"{name} is {text[:80]}; it must be {' or '.join(values)}", param=name)
    return values[text.lower()]


async def read_data(request: Request, config: ServerConfig) -> bytes:
    """The whole body.

    ``HttpError`` 413 as soon as it is known to be too large, 408 if it does not come in time, 415 if it is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415,
            f"the body has the Content-Encoding {shown(encoding)}; send it as plain JSON, without that header",
            code="unsupported_encoding",
        )
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(request, config.max_body_bytes)
    except TimeoutError:
        text = f"the body did not arrive within {config.body_timeout_s:g} s"
        raise HttpError(408, text, code="request_timeout") from None


async def _read(request: Request, max_body_bytes: int) -> bytes:
    too_large = HttpError(413, f"the body is larger than {max_body_bytes} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_body_bytes):
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_body_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def json_reply(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_reply(error: BaseException) -> Response:
    """The OpenAI-shaped answer to any exception; unforeseen ones are logged with their traceback."""
    status, body = describe_error(error)
    if status == 500:
        logger.error("a request failed: %s", error, exc_info=error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status in (408, 413, 415):  # else the rest of the body would be read as the next request
        headers["Connection"] = "close"
    if isinstance(error, HttpError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return json_reply(body, status, headers)


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work``; when the client leaves, cancel it, wait for its end, and raise ``ClientGoneError``.

    Call it after the whole body has been read: from then on ``receive`` returns only at the disconnect.
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

    The status line waits for the first event, so an error before it becomes an error answer.  After ``ping_s`` seconds
    of silence (0: never) it is sent nevertheless, with a comment, and a comment follows each further silence: proxies
    and clients close connections on which nothing comes.  An error after the status line becomes the last events, which
    ``failure`` makes of it.  A client's leaving closes the generator before the connection's task ends.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failure: Callable[[Exception], bytes],
        held: contextlib.ExitStack,
        *,
        ping_s: float,
    ) -> None:
        self._events = events
        self._failure = failure
        self._held = held
        self._ping_s = ping_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send_events(scope, receive, send))

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = _Parts(send)
        try:
            async with _pinging(parts, self._ping_s), contextlib.aclosing(self._events) as events:
                async for data in events:
                    await parts.send(data)
        except Exception as error:
            if not parts.begun:
                await error_reply(error)(scope, receive, send)
                return
            logger.error("a stream failed: %s", error)
            await parts.send(self._failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Parts:
    """The parts of a streamed answer; the status line goes before the first.  Two tasks may send."""

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
async def _pinging(parts: _Parts, ping_s: float) -> AsyncGenerator[None, None]:
    """Within, a comment is sent whenever ``ping_s`` seconds have passed without a part."""
    pings = asyncio.ensure_future(_ping(parts, ping_s))
    try:
        yield
    finally:
        pings.cancel()
        await asyncio.gather(pings, return_exceptions=True)


async def _ping(parts: _Parts, ping_s: float) -> None:
    loop = asyncio.get_running_loop()
    while ping_s > 0:
        await asyncio.sleep(parts.sent_s + ping_s - loop.time())
        if loop.time() >= parts.sent_s + ping_s:
            await parts.send(_PING)
