"""What the server counts of HTTP exchanges, by route."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator

from prometheus_client import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tp_engine.server.metrics import families as f
from tp_engine.server.metrics.figures import Histogram, histograms, numbers, summaries

# They come every few seconds and would hide the others.
NOT_COUNTED = ("/metrics", "/live", "/health", "/ready", "/ping", "/load", "/version", "/server_info", "/engine")
_NO_ROUTE = "none"
_CLIENT_GONE = 499


class HttpFigures:
    """Totals since the start."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(f.HTTP_SECONDS.buckets or ()))
        self._fine_seconds = Histogram(f.HTTP_FINE_SECONDS.buckets or ())
        self._request_bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._response_bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def observe(
        self, handler: str, method: str, status: int, *, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """An exchange is over; ``handler`` is the route's path."""
        self._requests[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method].observe(seconds)
        self._fine_seconds.observe(seconds)
        for sizes, size in ((self._request_bytes, request_bytes), (self._response_bytes, response_bytes)):
            sizes[handler][0] += 1
            sizes[handler][1] += size

    def metrics(self, model_name: str) -> Iterator[Metric]:
        """For the exposition."""
        yield numbers(f.HTTP_REQUESTS, model_name, self._requests.items())
        by_route = [(labels, one.bounds, one.counts, one.total) for labels, one in self._seconds.items()]
        yield histograms(f.HTTP_SECONDS, model_name, by_route)
        fine = self._fine_seconds
        yield histograms(f.HTTP_FINE_SECONDS, model_name, [((), fine.bounds, fine.counts, fine.total)])
        for family, sizes in (
            (f.HTTP_REQUEST_BYTES, self._request_bytes),
            (f.HTTP_RESPONSE_BYTES, self._response_bytes),
        ):
            yield summaries(
                family, model_name, [((handler,), count, total) for handler, (count, total) in sizes.items()]
            )


class HttpMetrics:
    """ASGI middleware that counts.  A path without a route is ``none``, so that nobody can make labels at will."""

    def __init__(self, app: ASGIApp, figures: HttpFigures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, num_bytes = time.monotonic(), _CLIENT_GONE, 0

        # No coroutine of its own: it is called for every chunk of every stream.
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
            if handler not in NOT_COUNTED:
                self._figures.observe(
                    handler, _method(scope), status,
                    seconds=time.monotonic() - started_s, request_bytes=_announced(scope), response_bytes=num_bytes,
                )  # fmt: skip


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH") else "other"


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 16:
            return int(value)
    return 0
