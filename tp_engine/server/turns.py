"""Which request begins next: a few in each iteration of the event loop, and clients in turn.

::

    a request            waits for                                       per iteration
    -------------------  ----------------------------------------------  ------------------
    a small body         all of it, which holds no place in a line       PER_TURN
    a large or chunked   nothing: it arrives within the memory of all    LARGE_PER_TURN
    one to be refused    nothing: it is answered unread                  REFUSED_PER_TURN

Checking a body takes up to a millisecond, so a burst of thousands would hold up health checks, running streams and the
requests of others for seconds.  Therefore nothing costly is done before a body has come, and the waiting requests begin
one per client (``Caller.client``) in turn: ten thousand requests of one client delay another by one.  The requests of
one client begin in order of arrival.

An answer that is the same for all is made once for all who wait for it (``SharedAnswer``).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tp_engine.api.openai.errors import HttpError
from tp_engine.api.preparing import LARGE
from tp_engine.server.access import current_caller
from tp_engine.server.bodies import late_body
from tp_engine.server.replies import error_reply
from tp_engine.server.state import ServerState

PER_TURN, LARGE_PER_TURN, REFUSED_PER_TURN = 2, 1, 64

Answer = TypeVar("Answer")


class Turns:
    """Lets POST requests begin in turns; those to ``prompt_paths`` are refused here while no prompt is taken."""

    def __init__(self, app: ASGIApp, state: ServerState, prompt_paths: Collection[str]) -> None:
        self._app = app
        self._state = state
        self._prompt_paths = frozenset(prompt_paths)
        self._small, self._large = (Turnstile(state.limit.is_full, most) for most in (PER_TURN, LARGE_PER_TURN))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        is_small = _is_small(Headers(scope=scope))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        client, timeout_s = current_caller().client, self._state.config.body_timeout_s
        try:
            if is_small and not (path in self._prompt_paths and self._state.limit.is_full()):
                async with asyncio.timeout(timeout_s):
                    receive = await _with_whole_body(receive)
            await (self._small if is_small else self._large).wait(client)
            if path in self._prompt_paths:
                self._state.check_room()
        except TimeoutError:
            await error_reply(late_body(timeout_s))(scope, receive, send)
        except HttpError as error:
            await error_reply(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_small(headers: Headers) -> bool:
    length = headers.get("content-length", "0")
    return "transfer-encoding" not in headers and length.isdecimal() and len(length) < 16 and int(length) <= LARGE


async def _with_whole_body(receive: Receive) -> Receive:
    """Wait for the whole body, or until the client leaves; returns a ``receive`` that repeats it, then goes on."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    else:
        message = {"type": "http.request", "body": parts[0] if len(parts) == 1 else b"".join(parts)}
    first: Message | None = message

    async def again() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        given, first = first, None
        return given

    return again


class Turnstile:
    """Lets ``per_turn`` requests pass in each iteration of the event loop, the clients in turn.

    While the server ``is_full``, requests that pass are refused, which takes a tenth of the time: then
    ``REFUSED_PER_TURN`` pass, so that nobody waits long for a refusal.
    """

    def __init__(self, is_full: Callable[[], bool], per_turn: int = PER_TURN) -> None:
        self._is_full = is_full
        self._per_turn = self._num_free = per_turn
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by waiting client; the next one's is first

    async def wait(self, client: str = "") -> None:
        """Wait until the next request of the client may begin."""
        loop = asyncio.get_running_loop()
        if self._num_free == self._per_turn:
            loop.call_soon(self._next_turn)
        if self._num_free > 0:
            self._num_free -= 1
            return
        turn = loop.create_future()
        self._lines.setdefault(client, deque()).append(turn)
        await turn

    def _next_turn(self) -> None:
        for _ in range(REFUSED_PER_TURN if self._is_full() else self._per_turn):
            if not self._lines:
                self._num_free = self._per_turn
                return
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            turn = line.popleft()
            if line:
                self._lines[client] = line  # after all others
            if not turn.done():
                turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._next_turn)


class SharedAnswer(Generic[Answer]):
    """An answer that takes long to ``make``: begun at most every ``interval_s``, for all who have asked by then, so
    that nobody gets an answer that is older than the question."""

    def __init__(self, make: Callable[[], Awaitable[Answer]], interval_s: float) -> None:
        self._make, self._interval_s = make, interval_s
        self._may_begin_s = 0.0
        self._next: asyncio.Task[Answer] | None = None
        self._tasks: set[asyncio.Task[Answer]] = set()  # until they end: the loop itself does not keep them

    async def get(self) -> Answer:
        """Wait for the next answer."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._in_time())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        return await asyncio.shield(self._next)

    async def _in_time(self) -> Answer:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._may_begin_s - clock())
        self._may_begin_s = clock() + self._interval_s
        self._next = None
        return await self._make()
