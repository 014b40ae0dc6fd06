"""How the ranks of a team communicate: over a Unix socket in a folder that only this user may enter.

::

    first rank                                    each other rank
      <-- 7, generate ---------------------------   call 7 begins there
      --- 7, generate --------------------------->  call 7 begins here
      --- 7, generate, its outcome -------------->  the first rank has finished it

The first rank does not wait for ranks within a call: one that an exception has interrupted misses that outcome, and
makes the next call with the others.  Ranks that make different calls get an error, as do all at once if a rank's
process ends.  The sockets are served in a separate thread, in which no exceptions are set from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import queue
import time
from abc import abstractmethod
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler  # outcomes are objects of the caller's own job, as in torch's
from typing import Any, NamedTuple

from tp_engine.engine.service_socket import new_address, path_of, remove_address
from tp_engine.system.closing import Closing
from tp_engine.system.log import get_logger
from tp_engine.system.off_loop import LoopThread

logger = get_logger(__name__)

_LENGTH = 8
_MEET_S = 120.0
_LINGER_S = 10.0
_NAP_S = 0.1
_TOLD_AFTER_S = 10.0


class CallName(NamedTuple):
    """A call: its number on its rank, and the method."""

    number: int
    method: str

    def __str__(self) -> str:
        return f"{self.method} (its call {self.number})"


class TeamRank(Closing):
    """One rank of a team; calls are made by one thread at a time."""

    def __init__(self) -> None:
        self._loop = LoopThread("team")
        self._num_calls = 0
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    @abstractmethod
    def do(self, method: str, work: Callable[[], Any], meanwhile: Callable[[], object]) -> Any:
        """Return what ``work`` returned on the first rank, or raise what it raised; on the others it does not run, but
        ``meanwhile`` does."""

    @abstractmethod
    async def _leave(self) -> None:
        """Close the sockets."""

    def close(self) -> None:
        """Leave; the other ranks may have ended."""
        self._loop.finish(self._leave)

    def _next_call(self, method: str) -> CallName:
        self._num_calls += 1
        return CallName(self._num_calls, method)

    def _wait_for(self, is_so: Callable[[], object], told: str = "") -> None:
        """Wait until ``is_so``; ``told`` is a warning after some seconds."""
        warn_s = time.monotonic() + _TOLD_AFTER_S if told else math.inf
        while not is_so():
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=_NAP_S)
            if time.monotonic() > warn_s:
                logger.warning("waiting for %s; all ranks of a team make the same calls", told)
                warn_s = math.inf


class FirstRank(TeamRank):
    """The first of ``num_ranks``, which runs the calls.  The others find it at ``address``; ``meet`` waits for them."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._places = range(1, num_ranks)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._made: dict[int, tuple[str, int]] = {}  # method and rank of the last calls, by their numbers
        self._begun = dict.fromkeys(self._places, 0)  # the number of each other rank's last call
        self._fault: str | None = None
        self._server: asyncio.Server | None = None
        self.address = new_address()
        self._loop.run(self._listen)

    def meet(self) -> None:
        """Wait for the other ranks; raises ``TimeoutError`` if they do not come."""
        late_s = time.monotonic() + _MEET_S
        self._wait_for(lambda: len(self._writers) == len(self._places) or time.monotonic() > late_s)
        if len(self._writers) < len(self._places):
            raise TimeoutError(f"waited {_MEET_S:g} s for the other ranks of the team to make their LLM")
        remove_address(self.address)

    def do(self, method: str, work: Callable[[], Any], meanwhile: Callable[[], object]) -> Any:
        call = self._next_call(method)
        outcome = _packed(call, None, RuntimeError(f"the first rank of the team was interrupted in {call}"))
        try:
            self._loop.post(self._note, 0, call)
            self._tell(call, b"")
            self._wait_for_others(call.number - 1)
            result = work()
            outcome = _packed(call, result, None)
        except Exception as error:
            outcome = _packed(call, None, error)
            raise
        finally:
            self._tell(call, outcome)
        return result

    def _wait_for_others(self, number: int) -> None:
        """Wait until all have begun this call, so that none falls far behind; raises if that cannot be."""
        self._wait_for(
            lambda: self._fault or all(begun >= number for begun in self._begun.values()),
            f"other ranks of the team to begin call {number}, which the first has ended",
        )
        if self._fault:
            raise RuntimeError(f"{self._fault}; the engine takes no further call of this team: close it on all ranks")

    def _tell(self, call: CallName, outcome: bytes) -> None:
        self._loop.post(self._send, json.dumps(call).encode(), outcome)

    def _send(self, *parts: bytes) -> None:
        for writer in self._writers.values():
            for part in parts:
                writer.write(len(part).to_bytes(_LENGTH, "little") + part)

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._hear, path_of(self.address))

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = None
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            place = int(await _message(reader))
            self._writers[place] = writer
            self._news.put(None)
            while True:
                call = CallName(*json.loads(await _message(reader)))
                self._note(place, call)
                self._begun[place] = call.number
                self._news.put(None)
        self._fault = self._fault or f"rank {place} of the team has left, by its close() or the end of its process"
        self._news.put(None)

    def _note(self, place: int, call: CallName) -> None:
        """Compare a call with those of the same number."""
        method, other = self._made.setdefault(call.number, (call.method, place))
        if method != call.method:
            self._fault = self._fault or _out_of_step(place, call, other, method)
        self._made.pop(call.number - 3, None)

    async def _leave(self) -> None:
        if self._server is not None:
            self._server.close()
        remove_address(self.address)
        await asyncio.gather(*map(_close, self._writers.values()))


class OtherRank(TeamRank):
    """The rank at ``place``, of a team whose first rank is at ``address``."""

    def __init__(self, place: int, address: str) -> None:
        super().__init__()
        self._place, self._address = place, address
        self._newest = 0  # the first rank's last call
        self._methods: dict[int, str] = {}
        self._outcomes: dict[int, bytes] = {}
        self._has_ended = False
        self._writer: asyncio.StreamWriter | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._loop.run(self._connect)

    def do(self, method: str, work: Callable[[], Any], meanwhile: Callable[[], object]) -> Any:
        call = self._next_call(method)
        self._loop.post(self._send, json.dumps(call).encode())
        meanwhile()
        first = "the first rank of the team"
        self._wait_for(lambda: self._newest >= call.number or self._has_ended, f"{first} to begin {call}")
        there = self._methods.get(call.number, method)
        if there != method:
            raise RuntimeError(f"{_out_of_step(self._place, call, 0, there)}; close the engine on all ranks")
        self._wait_for(lambda: call.number in self._outcomes or self._newest > call.number or self._has_ended)
        outcome = self._outcomes.get(call.number)
        for kept in (self._methods, self._outcomes):
            for number in [number for number in kept if number <= call.number]:
                del kept[number]
        if outcome is None and self._has_ended:
            raise RuntimeError(f"{first} has left, by its close() or the end of its process; close this LLM, too")
        if outcome is None:
            raise RuntimeError(f"{first} was interrupted in {call}")
        result, failure = ForkingPickler.loads(outcome)
        if failure is not None:
            raise failure
        return result

    def _send(self, message: bytes) -> None:
        assert self._writer is not None
        self._writer.write(len(message).to_bytes(_LENGTH, "little") + message)

    async def _connect(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(path_of(self._address))
        self._send(str(self._place).encode())
        self._hearing = asyncio.ensure_future(self._hear(reader))

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, method = json.loads(await _message(reader))
                outcome = await _message(reader)
                self._methods[number] = method
                if outcome:
                    self._outcomes[number] = outcome
                self._newest = number
                self._news.put(None)
        self._has_ended = True
        self._news.put(None)

    async def _leave(self) -> None:
        if self._writer is not None:
            await _close(self._writer)


def _out_of_step(place: int, call: CallName, other: int, method: str) -> str:
    return f"the ranks of the team are out of step: {call} on rank {place} is {method} on rank {other}"


def _packed(call: CallName, result: Any, failure: Exception | None) -> bytes:
    """The outcome of a call for the other ranks."""
    try:
        return bytes(ForkingPickler.dumps((result, failure)))
    except Exception as error:
        words = f"{call} ended on the first rank of the team with what cannot be sent to the others ({error})"
        if failure is not None:
            words = f"{call} failed on the first rank of the team: {type(failure).__name__}: {failure}"
        return bytes(ForkingPickler.dumps((None, RuntimeError(words))))


async def _message(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH), "little"))


async def _close(writer: asyncio.StreamWriter) -> None:
    """Send what remains, if the peer reads, and close."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), _LINGER_S)
