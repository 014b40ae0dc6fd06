"""What a request must pass before it is looked at: the API key, and the limit on its body."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tp_engine.api.openai_errors import HttpError
from tp_engine.server.replies import error_reply

# Everything else needs the key, so that a route added later is guarded too.
OPEN_PATHS = ("/health", "/ready", "/metrics")


class ApiKeyGuard:
    """ASGI middleware: 401 for every path but the open ones, unless ``Authorization: Bearer <key>`` matches."""

    def __init__(self, app: ASGIApp, api_key: str, root_path: str = "") -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()
        self._open_paths = {prefix + path for path in OPEN_PATHS for prefix in ("", root_path)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not self._has_key(scope):
            error = HttpError(401, "missing or wrong API key; send Authorization: Bearer <key>", code="invalid_api_key")
            await error_reply(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, self._expected)


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body; 413 as soon as it is known to be larger than ``max_body_bytes``."""
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
