"""What every request passes before its route.

::

    Entrance    each request is counted and gets an id; HEAD becomes GET
    Checks      503 where there are too many connections (connections.py)
    CORS        starlette's, if other origins are allowed
    Checks      pages of other sites (request_guard.py), keys (access.py); then the path is normalised
    Turns       the body of a POST comes, and its turn (turns.py)
    the route
"""

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.protocol import MAX_REQUEST_ID, REQUEST_ID
from tp_engine.errors import RequestError
from tp_engine.server.body_budget import BODY_ROOM, BodyBudget, BodyRoom
from tp_engine.server.metrics.figures import HttpFigures
from tp_engine.server.replies import error_reply
from tp_engine.system.log import bind_request

TOO_MANY_CONNECTIONS = "too_many_connections"

# Prometheus and load balancers ask for these every few seconds; in the figures they would hide the other routes.
_NOT_COUNTED = ("/metrics", "/live", "/health", "/ready", "/ping", "/load", "/version", "/server_info", "/engine")
_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
_NO_ROUTE = "none"
_CLIENT_GONE = 499
_ID_HEADER, _ANTHROPIC_ID_HEADER = "x-request-id", "request-id"
_VALID_ID = re.compile(REQUEST_ID)
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}\b")
_CARRIER: ContextVar[Mapping[str, str]] = ContextVar("trace_carrier", default={})  # noqa: B039 (never changed)


class Entrance:
    """Counts requests by route, and names them.

    ``X-Request-Id`` of every answer is the client's, if valid, or a new one; log lines and spans have it too.
    ``Request-Id`` is the same, for Anthropic's clients.
    ``scope["state"]["request_id"]`` is the id; ``name_request`` replaces it by the body's.
    ``scope["state"]["client_request_id"]`` is the header's id, or None.  Spans belong to the caller's trace.

    ``scope["state"]`` also has the room of the request's body, which is given back at its end.

    HEAD gets the status and headers of GET.  ``shape_errors`` is called with each path, without ``root_path``.
    """

    def __init__(
        self,
        app: ASGIApp,
        figures: HttpFigures,
        bodies: BodyBudget,
        shape_errors: Callable[[str], None],
        root_path: str = "",
    ) -> None:
        self._app = app
        self._bodies = bodies
        self._figures = figures
        self._shape_errors = shape_errors
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, num_bytes, method = time.monotonic(), _CLIENT_GONE, 0, scope["method"]
        state, is_head = scope.setdefault("state", {}), method == "HEAD"
        room = state[BODY_ROOM] = BodyRoom(self._bodies)

        # A plain function, not a coroutine: it is called for every chunk of every stream.
        def sending(message: Message) -> Awaitable[None]:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[_ID_HEADER] = headers[_ANTHROPIC_ID_HEADER] = state["request_id"]
            elif is_head:
                message = {**message, "body": b""}
            else:
                num_bytes += len(message.get("body", b""))
            return send(message)

        scope = {**scope, "method": "GET"} if is_head else scope  # uvicorn has its own scope
        self._shape_errors(self._enter(scope))
        try:
            await self._app(scope, receive, sending)
        finally:
            room.close()
            # Paths without a route count as ``none``, so that clients cannot invent labels.
            handler = getattr(scope.get("route"), "path", _NO_ROUTE)
            if handler not in _NOT_COUNTED:
                self._figures.observe(
                    handler, method if method in _METHODS else "other", status,
                    seconds=time.monotonic() - started_s, request_bytes=_announced(scope), response_bytes=num_bytes,
                )  # fmt: skip

    def _enter(self, scope: Scope) -> str:
        """Set the ids of a request; returns its path without ``root_path``."""
        headers, state = Headers(scope=scope), scope["state"]
        given = headers.get(_ID_HEADER, "")
        state["client_request_id"] = given if len(given) <= MAX_REQUEST_ID and _VALID_ID.match(given) else None
        state["request_id"] = state["client_request_id"] or uuid.uuid4().hex
        parent = _TRACE_PARENT.match(headers.get("traceparent", ""))
        _CARRIER.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        bind_request(state["request_id"], None if parent is None else parent.group(1))
        return str(scope["path"]).removeprefix(self._root_path)


def _announced(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 16 else 0


class Checks:
    """Answers with the error that one of the checks raises, before a body is read."""

    def __init__(self, app: ASGIApp, *checks: Callable[[Scope], None]) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                for check in self._checks:
                    check(scope)
            except (HttpError, RequestError) as error:
                reply = error_reply(error)
                if error.code == TOO_MANY_CONNECTIONS or has_two_lengths(Headers(scope=scope)):
                    reply.headers["Connection"] = "close"
                await reply(scope, receive, send)
                return
        await self._app(scope, receive, send)


def plain_paths(root_path: str) -> Callable[[Scope], None]:
    """A check that removes a path's last slash, which some clients add when they join addresses.

    Paths are accepted with and without ``root_path``, under which a reverse proxy offers the server; links have it.
    """

    def change(scope: Scope) -> None:
        if scope["path"].endswith("/"):
            path = scope["path"].rstrip("/")
            scope["path"] = path if path not in ("", root_path) else f"{path}/"
        if root_path:
            scope["root_path"] = root_path

    return change


def has_two_lengths(headers: Headers) -> bool:
    """Whether it is ambiguous where the body ends; a proxy may take what follows for another request."""
    return "transfer-encoding" in headers and "content-length" in headers


def name_request(state: dict[str, str | None], of_body: str | None) -> str:
    """The id of a request that has a body: the header's has priority over the body's, as in vLLM."""
    name = state["client_request_id"] or of_body or state["request_id"]
    assert name is not None
    state["request_id"] = name
    bind_request(name)
    return name


def trace_carrier() -> Mapping[str, str]:
    """The headers ``traceparent`` and ``tracestate`` of this task's request, as far as it has them."""
    return _CARRIER.get()
