"""A burst of requests begins a few at a time, so that health checks and running streams have their turns in between."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

PER_TURN = 2


class Turnstile:
    """ASGI middleware: ``PER_TURN`` POST requests begin in one turn of the event loop, in order of arrival.

    Checking a body takes up to a millisecond; a thousand at once would be a second in which nothing else happens.
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
