"""The boards of several hosts, kept alike: each host's first rank exchanges slots with rank 0, and notices lost hosts.

::

    host 0                                   host 1
      rank 0: HostLinks  <===== TCP =====>     first rank: HostLinks
        sends slots of all other hosts           sends the slots of its own host
        board: all ranks                         board: all ranks

    a beat     | length u32 | msgpack: sent at, ns; sent at of the peer's last beat, ns; held, ns; slots |

A beat goes out every quarter of a second, and at once when a rank has failed or ended.  The watchdogs, the check of
echoes, the flight record and the metrics read the board and know nothing of this.

*Clocks*: a beat returns the time of the peer's last one and how long it was held, so each beat measures a round trip;
of the last 64 the shortest counts.  Half of it is the time that this beat took.  Slots that arrive before the first
round trip are dropped.

*Death*: the kernel closes a dead process's connection at once, and ends one whose peer acknowledges nothing for
``host_timeout_s`` (a dead host or link).  A stopped process is neither: its kernel acknowledges; its beats cease, and
the hang watch sees it as it sees any stopped rank.
"""

import asyncio
import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

import msgspec

from tp_engine.ipc.board_mirror import Mirrored, PackedSlot, SlotPacker, unpack_slots
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import Ended, State, process_vitals, resident_bytes
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

BEAT_S: Final = 0.25
_SILENT_S: Final = 1.0
_VITALS_S: Final = 1.0
_TELL_S: Final = 0.5
_FAREWELL_S: Final = 0.5
_POLL_S: Final = 0.005
_FIRST_ROUNDS: Final = 8
_MAX_BYTES: Final = 1 << 26
_LOST: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)

_Beat: TypeAlias = tuple[int, int, int, list[PackedSlot]]


class ClockOffset:
    """How far the peer's clock is ahead of this host's, from round trips: the shortest of the last 64 counts."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, int]] = deque(maxlen=64)

    def add(self, sent_ns: int, peer_ns: int, held_ns: int, received_ns: int) -> None:
        """Sent here at ``sent_ns``, held there for ``held_ns`` until ``peer_ns``, received here at ``received_ns``."""
        round_trip_ns = received_ns - sent_ns - held_ns
        self._rounds.append((round_trip_ns, peer_ns + round_trip_ns // 2 - received_ns))

    @property
    def ahead_ns(self) -> int | None:
        """Nanoseconds; None before the first round trip."""
        return min(self._rounds)[1] if self._rounds else None


class _Link:
    """The connection to one other host; ``ranks`` are those whose slots are sent, ``due`` asks for a beat."""

    def __init__(self, host: int, ranks: list[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host, self.ranks, self.reader, self.writer = host, ranks, reader, writer
        self.address = str((writer.get_extra_info("peername") or ("",))[0])  # none if it has been reset already
        self.clock = ClockOffset()
        self.packer = SlotPacker()
        self.due = asyncio.Event()
        self.peer_sent_ns = self.peer_received_ns = 0
        self.num_rounds = 0
        self.is_over = False
        writer.transport.set_write_buffer_limits(high=0)

    @property
    def num_unsent(self) -> int:
        """Bytes of beats that the kernel has not taken yet."""
        return self.writer.transport.get_write_buffer_size()


class HostLinks:
    """The connections of one first rank, and the thread whose event loop serves them.  ``wake`` is called when another
    host's rank has failed or ended; ``mirrored`` with every slot that has arrived."""

    def __init__(self, board: JobBoard, rank: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.mirrored: Mirrored = lambda slot, records: None
        self._board, self._rank = board, rank
        self._links: dict[int, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"hosts of rank {rank}", daemon=True)
        self._thread.start()

    def add(self, host: int, connection: socket.socket) -> None:
        """Serve the connection to ``host``'s first rank; from any thread."""
        connection.setblocking(False)
        self._loop.call_soon_threadsafe(self._begin, self._serve(host, connection))

    def tell(self) -> None:
        """Send a beat now, before this returns: the process may end at once.  Does nothing after ``stop``."""
        with self._lock, contextlib.suppress(TimeoutError):
            if not self._is_over:
                asyncio.run_coroutine_threadsafe(self._tell(), self._loop).result(_TELL_S)

    def stop(self) -> None:
        """Send a last beat, wait a moment for the other ends to read it, and close.  Safe to call twice."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._begin(self._look_at_own_host())
        self._loop.run_forever()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        return task

    async def _look_at_own_host(self) -> None:
        """Note on the board what other hosts cannot see: how the processes of this one are."""
        while True:
            for slot in self._board.local_slots:
                if slot.pid:
                    slot.host.note_vitals(*process_vitals(slot.pid), resident_bytes(slot.pid))
            await asyncio.sleep(_VITALS_S)

    async def _serve(self, host: int, connection: socket.socket) -> None:
        """Exchange beats until the connection ends."""
        topology = self._board.topology
        others = [rank for rank in range(topology.world_size) if topology.host_of(rank) != host]
        mine = others if self._rank == 0 else list(topology.ranks_of(self._board.host))
        link = self._links[host] = _Link(host, mine, *await asyncio.open_connection(sock=connection))
        sending = self._begin(self._send_beats(link))
        try:
            while True:
                num_bytes = int.from_bytes(await link.reader.readexactly(4), "little")
                if num_bytes > _MAX_BYTES:
                    raise ValueError(f"a beat of {num_bytes} bytes came")
                self._take_beat(link, msgspec.msgpack.decode(await link.reader.readexactly(num_bytes), type=_Beat))
        except asyncio.IncompleteReadError:
            self._end(link, Ended.CLOSED, "the other end closed it")
        except OSError as error:
            how = Ended.LOST if error.errno in _LOST else Ended.CLOSED
            self._end(link, how, error.strerror or str(error))
        except Exception as error:
            logger.exception("the connection to host %d failed", host)
            self._end(link, Ended.CLOSED, f"{type(error).__name__}: {error}")
        finally:
            sending.cancel()

    async def _send_beats(self, link: _Link) -> None:
        """Send a beat when one is due, each after the one before has been taken."""
        with contextlib.suppress(OSError):  # which ends the reading too
            while True:
                link.due.clear()
                link.writer.write(self._new_beat(link))
                await link.writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(link.due.wait(), BEAT_S)

    async def _tell(self) -> None:
        for link in self._links.values():
            self._beat(link)

    def _beat(self, link: _Link) -> None:
        """Send a beat now, or as soon as what was sent before has been taken."""
        if link.num_unsent:
            link.due.set()
        elif not link.is_over:
            link.writer.write(self._new_beat(link))

    def _new_beat(self, link: _Link) -> bytes:
        now_ns = time.monotonic_ns()
        is_heard = now_ns - link.peer_received_ns < _SILENT_S * 1e9
        slots = [self._board.slots[rank] for rank in link.ranks]
        packed = link.packer.pack(slots, with_records=self._rank != 0) if is_heard or not link.num_rounds else []
        held_ns = now_ns - link.peer_received_ns if link.peer_received_ns else 0
        beat = msgspec.msgpack.encode((now_ns, link.peer_sent_ns, held_ns, packed))
        return len(beat).to_bytes(4, "little") + beat

    def _take_beat(self, link: _Link, beat: _Beat) -> None:
        now_ns = time.monotonic_ns()
        sent_ns, echoed_ns, held_ns, slots = beat
        if echoed_ns:
            link.clock.add(echoed_ns, sent_ns, held_ns, now_ns)
        link.peer_sent_ns, link.peer_received_ns = sent_ns, now_ns
        ahead_ns = link.clock.ahead_ns
        if ahead_ns is not None and unpack_slots(self._board, slots, ahead_ns, self.mirrored):
            self.wake()
            if self._rank == 0 and len(self._links) > 1:
                for other in self._links.values():
                    self._beat(other)
        link.num_rounds += 1
        if link.num_rounds <= _FIRST_ROUNDS:
            self._beat(link)

    def _end(self, link: _Link, how: Ended, why: str) -> None:
        """The connection has ended: unless its host has left, its first rank counts as ended."""
        if link.is_over:
            return
        link.is_over = True
        slot = self._board.slots[self._board.topology.leader_of(link.host)]
        if slot.state != State.LEFT:
            if slot.state != State.FAILED:
                logger.error("the connection to host %d (%s) is over: %s", link.host, slot.host.name or "unknown", why)
            slot.host.note_ended(how, time.monotonic_ns())
        self.wake()
        if how == Ended.LOST:
            _cut_connections(link.address)

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await asyncio.gather(*map(self._take_leave, self._links.values()), return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            link.is_over = True
            link.writer.transport.abort()  # what it has not taken by now would keep the connection open

    async def _take_leave(self, link: _Link) -> None:
        """Send a last beat; return when the other end has closed: what it still sends must not reset the connection."""
        if link.is_over:
            return
        await link.writer.drain()
        link.writer.write(self._new_beat(link))
        await link.writer.drain()
        link.is_over = True
        link.writer.write_eof()
        while not link.reader.at_eof():
            await asyncio.sleep(_POLL_S)


def _cut_connections(address: str) -> None:
    """Shut down this process's connections to a host that is lost, gloo's too.  A collective that waits to receive from
    that host would wait until its timeout: no packet tells it.  Now it raises."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                _shut_down(int(name), address)


def _shut_down(descriptor: int, address: str) -> None:
    """Shut down this process's socket ``descriptor`` if it is a TCP connection to ``address``."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        is_tcp = one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and one.getpeername()[0].removeprefix("::ffff:") == address:
            one.shutdown(socket.SHUT_RDWR)
