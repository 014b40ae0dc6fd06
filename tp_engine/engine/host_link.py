"""The boards of several hosts, kept alike: each host's first rank exchanges slots with rank 0, and notices lost hosts.

::

    host 0                                   host 1
      rank 0: HostLinks  <===== TCP =====>     first rank: HostLinks
        sends slots of all other hosts           sends the slots of its own host
        board: all ranks                         board: all ranks

    a beat     | length u32 | sent at, ns | sent at of the peer's last beat, ns | held, ns | slots |

A beat goes out every quarter of a second, and at once when a rank has failed or ended.  The watchdogs, the check of
echoes, the flight record and the metrics read the board and know nothing of this.

*Clocks*: a beat returns the time of the peer's last one and how long it was held, so each beat measures a round trip;
of the last 64 the shortest counts.  Half of it is the time that this beat took.  Slots that arrive before the first
round trip are dropped.

*Death*: the kernel closes a dead process's connection at once, and ends one whose peer acknowledges nothing for
``host_timeout_s`` (a dead host or link).  A stopped process is neither: its kernel acknowledges; its beats cease, and
the hang watch sees it as it sees any stopped rank.
"""

import contextlib
import errno
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from tp_engine.ipc.board_mirror import Mirrored, SlotPacker, unpack_slots
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import Ended, State, process_vitals, resident_bytes
from tp_engine.ipc.relay import Messages, framed
from tp_engine.log import get_logger

logger = get_logger(__name__)

BEAT_S: Final = 0.25
_SILENT_S: Final = 1.0
_VITALS_S: Final = 1.0
_FAREWELL_S: Final = 0.5
_FIRST_ROUNDS: Final = 8
_TIMES: Final = struct.Struct("<QQQ")
_CHUNK_BYTES: Final = 1 << 18
_LOST: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


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
    """The connection to one other host."""

    def __init__(self, host: int, connection: socket.socket, ranks: list[int]) -> None:
        self.host = host
        self.socket = connection
        self.address = str(connection.getpeername()[0])
        self.ranks = ranks  # whose slots are sent
        self.clock = ClockOffset()
        self.packer = SlotPacker()
        self.arriving = Messages(connection)
        self.unsent = memoryview(b"")
        self.is_due = False  # a beat has to wait for the rest of the one before
        self.peer_sent_ns = self.peer_received_ns = 0
        self.num_rounds = 0
        self.is_over = False


class HostLinks:
    """The connections of one first rank, and the thread that serves them.  ``wake`` is called when another host's rank
    has failed or ended; ``mirrored`` with every slot that has arrived."""

    def __init__(self, board: JobBoard, rank: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.mirrored: Mirrored = lambda slot, records: None
        self._board, self._rank = board, rank
        self._links: dict[int, _Link] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._poked = os.eventfd(0, os.EFD_NONBLOCK)
        self._looked_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"hosts of rank {rank}", daemon=True)
        self._thread.start()

    def add(self, host: int, connection: socket.socket) -> None:
        """Serve the connection to ``host``'s first rank; from any thread."""
        connection.setblocking(False)
        topology = self._board.topology
        others = [rank for rank in range(topology.world_size) if topology.host_of(rank) != host]
        mine = others if self._rank == 0 else list(topology.ranks_of(self._board.host))
        with self._lock:
            if self._over.is_set():
                connection.close()
                return
            self._links[host] = _Link(host, connection, mine)
            self.poke()

    def poke(self) -> None:
        """Let the thread send a beat now."""
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._poked, 1)

    def tell(self) -> None:
        """Send a beat now, from this thread: the process may end at once.  Does nothing after ``stop``."""
        with self._lock:
            if self._over.is_set():
                return
            for link in self._links.values():
                self._send_beat(link)

    def stop(self) -> None:
        """Send a last beat, wait a moment for the other ends to read it, and close.  Safe to call twice."""
        if self._over.is_set():
            return
        self.tell()
        self._over.set()
        self.poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        deadline_s = time.monotonic() + _FAREWELL_S
        with self._lock:
            for link in self._links.values():
                self._close_gently(link, deadline_s)
            os.close(self._poked)

    def _run(self) -> None:
        next_s = 0.0
        while not self._over.is_set():
            try:
                is_poked = self._wait(next_s - time.monotonic())
                if is_poked or time.monotonic() >= next_s:
                    self._look_at_own_host()
                    self.tell()
                    next_s = time.monotonic() + BEAT_S
            except Exception as error:
                logger.exception("the connections between hosts failed")
                with self._lock:
                    for link in self._links.values():
                        self._end(link, Ended.CLOSED, f"{type(error).__name__}: {error}")
                raise

    def _wait(self, timeout_s: float) -> bool:
        """Receive what has come, and send the rest of beats, once; returns whether a beat was asked for."""
        poll = select.poll()
        poll.register(self._poked, select.POLLIN)
        with self._lock:
            living = {link.socket.fileno(): link for link in self._links.values() if not link.is_over}
            for descriptor, link in living.items():
                poll.register(descriptor, select.POLLIN | (select.POLLOUT if link.unsent else 0))
        ready = dict(poll.poll(max(0.0, 1000 * timeout_s)))
        is_poked = ready.pop(self._poked, 0) != 0
        with self._lock:
            for descriptor, events in ready.items():
                if events & select.POLLOUT:
                    self._send_rest(living[descriptor])
                    if living[descriptor].is_due:
                        self._send_beat(living[descriptor])
                if events & ~select.POLLOUT:
                    self._receive(living[descriptor])
        if is_poked:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._poked)
        return is_poked

    def _look_at_own_host(self) -> None:
        """Note on the board what other hosts can not see: how the processes of this one are."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _VITALS_S:
            return
        self._looked_s = now_s
        for slot in self._board.local_slots:
            if slot.pid:
                slot.host.note_vitals(*process_vitals(slot.pid), resident_bytes(slot.pid))

    def _send_beat(self, link: _Link) -> None:
        """Send what is left of the last beat, then a new one, as far as the socket takes them."""
        self._send_rest(link)
        link.is_due = bool(link.unsent)
        if not link.is_due and not link.is_over:
            link.unsent = self._new_beat(link)
            self._send_rest(link)

    def _new_beat(self, link: _Link) -> memoryview:
        now_ns = time.monotonic_ns()
        is_heard = now_ns - link.peer_received_ns < _SILENT_S * 1e9
        slots = [self._board.slots[rank] for rank in link.ranks]
        packed = link.packer.pack(slots, with_records=self._rank != 0) if is_heard or not link.num_rounds else b""
        held_ns = now_ns - link.peer_received_ns if link.peer_received_ns else 0
        return framed(_TIMES.pack(now_ns, link.peer_sent_ns, held_ns) + packed)

    def _send_rest(self, link: _Link) -> None:
        try:
            while link.unsent and not link.is_over:
                link.unsent = link.unsent[link.socket.send(link.unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(link, error)

    def _receive(self, link: _Link) -> None:
        if link.is_over:
            return
        try:
            for beat in link.arriving.take():
                self._take_beat(link, beat)
        except OSError as error:
            self._lose(link, error)
        except (ValueError, struct.error) as error:
            self._end(link, Ended.CLOSED, f"what came is no beat: {error}")
        if link.arriving.has_ended:
            self._end(link, Ended.CLOSED, "the other end closed it")

    def _take_beat(self, link: _Link, beat: bytearray) -> None:
        now_ns = time.monotonic_ns()
        sent_ns, echoed_ns, held_ns = _TIMES.unpack_from(beat)
        if echoed_ns:
            link.clock.add(echoed_ns, sent_ns, held_ns, now_ns)
        link.peer_sent_ns, link.peer_received_ns = sent_ns, now_ns
        ahead_ns = link.clock.ahead_ns
        slots = memoryview(beat)[_TIMES.size :]
        if ahead_ns is not None and unpack_slots(self._board, slots, ahead_ns, self.mirrored):
            self.wake()
            if self._rank == 0 and len(self._links) > 1:
                self.poke()
        link.num_rounds += 1
        if link.num_rounds <= _FIRST_ROUNDS:
            self._send_beat(link)

    def _lose(self, link: _Link, error: OSError) -> None:
        how = Ended.LOST if error.errno in _LOST else Ended.CLOSED
        self._end(link, how, error.strerror or str(error))

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

    def _close_gently(self, link: _Link, deadline_s: float) -> None:
        """Close after the other end has closed, or at the deadline: what it still sends must not reset the connection.
        A beat that had to wait is sent before."""
        with contextlib.suppress(OSError):
            link.socket.settimeout(max(0.01, deadline_s - time.monotonic()))
            if not link.is_over:
                link.socket.sendall(link.unsent)
                if link.is_due:
                    link.socket.sendall(self._new_beat(link))
            link.socket.shutdown(socket.SHUT_WR)
            while not link.is_over and link.socket.recv(_CHUNK_BYTES):
                link.socket.settimeout(max(0.01, deadline_s - time.monotonic()))
        link.socket.close()


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
