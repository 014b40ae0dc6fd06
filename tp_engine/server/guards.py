"""What a request must pass before it is looked at: the API key, and the limit on its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import RequestError
from tp_engine.server.config import ServerConfig
from tp_engine.server.page_files import ASSETS
from tp_engine.server.replies import error_reply

# Everything else needs a key, so that a route added later is guarded too.
OPEN_PATHS = ("/live", "/health", "/ping", "/ready", "/version", "/metrics", "/")
_PAGE_PATHS = tuple(f"/page/{name}" for name in ASSETS)


class ApiKeyGuard:
    """ASGI middleware: 401 for every path but the open ones, unless ``Authorization: Bearer <key>`` brings a key.

    Digests are compared, all of them and in constant time, so that an answer's time tells nothing of the keys.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], root_path: str = "") -> None:
        self._app = app
        self._expected = [_digest(key.encode()) for key in api_keys]
        self._open_paths = {prefix + path for path in OPEN_PATHS + _PAGE_PATHS for prefix in ("", root_path)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not self._has_key(scope):
            error = HttpError(401, "missing or wrong API key; send Authorization: Bearer <key>", code="invalid_api_key")
            await error_reply(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, expected) for expected in self._expected]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body; ``HttpError`` 413 as soon as it is known to be too large, 408 if it does not come in time.

    Refuses what says that it is not JSON: web pages of strangers can send only that without being asked first.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"the body is of type {kind[:80]!r}; send Content-Type: application/json")
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(request, config.max_body_bytes)
    except TimeoutError:
        text = f"the body did not arrive within {config.body_timeout_s:g} s"
        raise HttpError(408, text, code="request_timeout") from None


async def _read(request: Request, max_body_bytes: int) -> bytes:
    too_large = HttpError(413, f"the body is larger than {max_body_bytes} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_body_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_body_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)
