"""``X-Request-Id``: the client's own, the body's ``request_id``, or a fresh one, on every answer."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tp_engine.api.openai.protocol import MAX_REQUEST_ID, REQUEST_ID
from tp_engine.log import bind_request

_HEADER = "x-request-id"
_VALID = re.compile(REQUEST_ID)


class RequestIds:
    """ASGI middleware.  ``scope["state"]["request_id"]`` is the id; a handler that finds a better one replaces it.

    A header that can not be an id is ignored.  ``scope["state"]["client_request_id"]`` is what it said, or None.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        named = given if len(given) <= MAX_REQUEST_ID and _VALID.match(given) else None
        state = scope.setdefault("state", {})
        state["client_request_id"] = named
        state["request_id"] = named or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = state["request_id"]
            await send(message)

        await self._app(scope, receive, send_with_id)


def name_request(state: dict[str, str | None], of_body: str | None) -> str:
    """The id of a request that has a body: the header's goes before the body's, as in vLLM."""
    name = state["client_request_id"] or of_body or state["request_id"]
    assert name is not None
    state["request_id"] = name
    bind_request(name)
    return name
