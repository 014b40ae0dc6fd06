"""One budget of memory for the bodies of all requests.

::

    a body          counts
    --------------  ----------------------------------------------------------------------------------------
    its first part  nothing: every connection has as much anyway, so small requests always pass
    all beyond it   what has come, from its arrival to the end of the answer: parts of it live as long

A body that finds no room is refused, unless others have stalled: those end first, as their clients may never continue.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from tp_engine.api.openai.errors import HttpError
from tp_engine.api.preparing import LARGE
from tp_engine.system.heap import HeapTrimmer

BODY_ROOM = "body_room"
"""The request's ``BodyRoom`` in its scope's state."""
NO_ROOM_FOR_BODY = "no_room_for_body"

# A body of which less than ``LARGE`` has come in this time has stalled.
_STILL_S = 2.0
_RETRY_AFTER_S = 2


class BodyBudget:
    """At most ``num_bytes`` of bodies; for one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._used = 0
        self._arriving: dict[BodyRoom, None] = {}  # the oldest first
        self._trimmer = HeapTrimmer()

    @property
    def used(self) -> int:
        """Bytes that are held now."""
        return self._used

    def check(self, num_bytes: int) -> None:
        """Raise ``HttpError`` 503 unless there is room for ``num_bytes`` more."""
        for room in [one for one in self._arriving if one.stands_still]:
            if self._used + num_bytes <= self._num_bytes:
                return
            room.give_way()
        if self._used + num_bytes > self._num_bytes:
            raise HttpError(
                503,
                f"the bodies of other requests hold {self._used:,} of {self._num_bytes:,} bytes, and {num_bytes:,} "
                "more do not fit; try again later, or serve with a larger --max-bodies-bytes",
                code=NO_ROOM_FOR_BODY,
                retry_after_s=_RETRY_AFTER_S,
            )

    def take(self, num_bytes: int) -> None:
        """Hold ``num_bytes`` more; raises as ``check`` does."""
        self.check(num_bytes)
        self._used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Hold ``num_bytes`` less."""
        self._used -= num_bytes
        self._trimmer.note_freed(num_bytes)

    @contextlib.contextmanager
    def arriving(self, room: "BodyRoom") -> Iterator[None]:
        """Within, the body of ``room`` arrives, and gives way if it stalls."""
        self._arriving[room] = None
        try:
            yield
        finally:
            del self._arriving[room]


class BodyRoom:
    """What the body of one request holds, until ``close``."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = self._held = 0
        self._mark, self._mark_s = 0, 0.0
        self._timeout: asyncio.Timeout | None = None
        self.gave_way = False
        """Whether it ended because it had stalled while others needed room."""

    @contextlib.asynccontextmanager
    async def arriving(self, timeout_s: float) -> AsyncIterator[None]:
        """Within, the body arrives; raises ``TimeoutError`` when the time is over or it gives way."""
        self._mark_s = time.monotonic()
        async with asyncio.timeout(timeout_s) as self._timeout:
            with self._budget.arriving(self):
                yield

    def announce(self, size: int) -> None:
        """Raise ``HttpError`` 503 if a body of ``size`` bytes does not fit."""
        self._budget.check(max(0, size - LARGE))

    def grow(self, num_bytes: int) -> None:
        """Hold ``num_bytes`` more of the body; raises ``HttpError`` 503 if there is no room."""
        self._size += num_bytes
        if (more := self._size - LARGE - self._held) > 0:
            self._budget.take(more)
            self._held += more
        if self._size - self._mark >= LARGE:
            self._mark, self._mark_s = self._size, time.monotonic()

    @property
    def stands_still(self) -> bool:
        """Whether too little has come lately."""
        return self._held > 0 and time.monotonic() - self._mark_s > _STILL_S

    def give_way(self) -> None:
        """End the arrival, for others who need the room."""
        assert self._timeout is not None, "it arrives"
        self.gave_way = True
        self._timeout.reschedule(asyncio.get_running_loop().time())
        self.close()

    def close(self) -> None:
        """Give back what is held."""
        held, self._held = self._held, 0
        if held:
            self._budget.give_back(held)
