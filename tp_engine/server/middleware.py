"""ASGI middleware, in the order in which a request passes it; ``app.py`` puts it together.

::

    HttpMetrics -> AnthropicErrors -> Turnstile -> HeadRequests -> RequestIds -> ConnectionLimit -> CORS
    -> RequestGuard -> KeyGuard -> Paths -> route

``AnthropicErrors`` is in ``anthropic_routes.py``, ``ConnectionLimit`` in ``connections.py``, ``RequestGuard`` in
``request_guard.py``, ``KeyGuard`` in ``access.py``.
"""

import asyncio
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Mapping
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tp_engine.api.openai.protocol import MAX_REQUEST_ID, REQUEST_ID
from tp_engine.log import bind_request
from tp_engine.server.metrics.figures import HttpFigures

PER_TURN = 2

# Prometheus and load balancers ask for these every few seconds; in the figures they would hide the other routes.
_NOT_COUNTED = ("/metrics", "/live", "/health", "/ready", "/ping", "/load", "/version", "/server_info", "/engine")
_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
_NO_ROUTE = "none"
_CLIENT_GONE = 499
_ID_HEADER = "x-request-id"
_VALID_ID = re.compile(REQUEST_ID)
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}\b")
_CARRIER: ContextVar[Mapping[str, str]] = ContextVar("trace_carrier", default={})  # noqa: B039 (never changed)


class HttpMetrics:
    """Counts requests by route.  Paths without a route count as ``none``, so that clients can not invent labels."""

    def __init__(self, app: ASGIApp, figures: HttpFigures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, num_bytes = time.monotonic(), _CLIENT_GONE, 0

        # A plain function, not a coroutine: it is called for every chunk of every stream.
        def counting(message: Message) -> Awaitable[None]:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                num_bytes += len(message.get("body", b""))
            return send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            handler = getattr(scope.get("route"), "path", _NO_ROUTE)
            if handler not in _NOT_COUNTED:
                self._figures.observe(
                    handler, scope["method"] if scope["method"] in _METHODS else "other", status,
                    seconds=time.monotonic() - started_s, request_bytes=_announced(scope), response_bytes=num_bytes,
                )  # fmt: skip


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 16:
            return int(value)
    return 0


class Turnstile:
    """Lets ``PER_TURN`` POST requests begin in one turn of the event loop, in order of arrival.

    Checking a body takes up to a millisecond.  A burst of a thousand would otherwise hold up health checks and running
    streams for a second.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_free = PER_TURN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._pass()
        await self._app(scope, receive, send)

    async def _pass(self) -> None:
        loop = asyncio.get_running_loop()
        if self._num_free == PER_TURN:
            loop.call_soon(self._next_turn)
        if self._num_free > 0:
            self._num_free -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        for _ in range(PER_TURN):
            if not self._waiting:
                self._num_free = PER_TURN
                return
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._next_turn)


class HeadRequests:
    """Answers HEAD with the status and headers of GET, on every path that has GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class RequestIds:
    """Puts ``X-Request-Id`` on every answer: the client's own, or a fresh one; log lines and spans have it too.

    ``scope["state"]["request_id"]`` is the id; ``name_request`` replaces it by the body's.  An invalid header is
    ignored.  ``scope["state"]["client_request_id"]`` is the header's id, or None.  Spans belong to the caller's trace.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(_ID_HEADER, "")
        named = given if len(given) <= MAX_REQUEST_ID and _VALID_ID.match(given) else None
        state = scope.setdefault("state", {})
        state["client_request_id"] = named
        state["request_id"] = named or uuid.uuid4().hex
        parent = _TRACE_PARENT.match(headers.get("traceparent", ""))
        _CARRIER.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        bind_request(state["request_id"], None if parent is None else parent.group(1))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_ID_HEADER] = state["request_id"]
            await send(message)

        await self._app(scope, receive, send_with_id)


def name_request(state: dict[str, str | None], of_body: str | None) -> str:
    """Return the id of a request that has a body: the header's goes before the body's, as in vLLM."""
    name = state["client_request_id"] or of_body or state["request_id"]
    assert name is not None
    state["request_id"] = name
    bind_request(name)
    return name


def trace_carrier() -> Mapping[str, str]:
    """Return those of the headers ``traceparent`` and ``tracestate`` that the request of this task has."""
    return _CARRIER.get()


class Paths:
    """Takes a path that ends with a slash for the one without: some clients join addresses so.

    Accepts paths with and without ``root_path``, under which a reverse proxy offers the server; links have it.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            path = scope["path"].rstrip("/")
            scope["path"] = path if path not in ("", self._root_path) else f"{path}/"
        if self._root_path:
            scope["root_path"] = self._root_path
        await self._app(scope, receive, send)
