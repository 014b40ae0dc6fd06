"""What lines of the log and spans say of the request on whose behalf they are: its id, and the caller's trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tp_engine.log import bind_request

_CARRIER: ContextVar[Mapping[str, str]] = ContextVar("trace_carrier", default={})  # noqa: B039 (never changed)
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}\b")


def trace_carrier() -> Mapping[str, str]:
    """The ``traceparent`` and ``tracestate`` headers of the request that this task serves, as far as it has them."""
    return _CARRIER.get()


class RequestContext:
    """ASGI middleware, to be placed within ``RequestIds``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            parent = _TRACE_PARENT.match(headers.get("traceparent", ""))
            _CARRIER.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
            bind_request(scope["state"]["request_id"], None if parent is None else parent.group(1))
        await self._app(scope, receive, send)
