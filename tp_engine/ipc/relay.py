"""Plans to another host: over TCP to the host's first rank, which puts them into the host's ring.

::

    rank 0                          first rank of host 1                                    rank k of host 1
      PlanLink.send  == TCP ==>       RelayReader.read: socket -> RingWriter  == ring ==>     RingReader.read
                                        and its own copy

    a message      | length u32 | an encoded plan |

Each plan crosses the network once per host.  No thread stands in the way: the first rank is itself the reader of the
socket, takes all that the socket has, passes it on, and runs its own copy.  A thread would have to wait for the
interpreter's lock.  The connection is authenticated when it is made (``handshake.py``); plans have a checksum and a
step id of their own (``plan_channel.py``).
"""

import contextlib
import select
import socket
import struct
import time
from collections import deque

from tp_engine.errors import RankError
from tp_engine.ipc.ring_buffer import Alive, RingWriter, WriterAlive

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 18
_ALIVE_CHECK_S = 0.5
_SEND_BUFFER_BYTES = 1 << 20
_GONE = "its connection for step plans is closed"


class PlanLink:
    """Rank 0's end of one connection; ``rank`` is the first rank of the host at the other end.  ``room_bytes``: a plan
    of that size never has to wait, if the other end has read all but one plan before it."""

    def __init__(self, connection: socket.socket, rank: int, *, alive: Alive) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        connection.setblocking(True)
        self.rank = rank
        # The kernel counts its own overhead in the buffer: half of it is surely room for data, in two messages.
        self.room_bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
        self._socket = connection
        self._alive = alive
        self._room = select.poll()  # ``select`` takes no descriptor above 1023
        self._room.register(connection, select.POLLOUT)

    def send(self, message: bytes | bytearray | memoryview, timeout_s: float) -> None:
        """Send ``message``; ``RankError`` if the other end takes nothing for ``timeout_s``, or is gone."""
        rest, deadline_s = memoryview(_LENGTH.pack(len(message)) + message), 0.0
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                deadline_s = deadline_s or time.monotonic() + timeout_s
                if time.monotonic() > deadline_s:
                    raise RankError(self.rank, f"has not taken a step plan within {timeout_s:g} s") from None
                if not self._alive(self.rank):
                    raise RankError(self.rank, "did not take a step plan: its process is gone") from None
                self._room.poll(1000 * _ALIVE_CHECK_S)
            except OSError as error:
                raise RankError(self.rank, f"{_GONE} ({error.strerror or error})") from error

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


class RelayReader:
    """The first rank's end, with the interface of ``RingReader``.  ``ring`` is the host's, for its other ranks (None if
    there are none); ``alive`` is asked every half second of a wait.  A rank that makes no room in the ring for
    ``ring_timeout_s`` is named by a ``RankError``."""

    has_alive = True

    def __init__(
        self, connection: socket.socket, ring: RingWriter | None, *, alive: WriterAlive, ring_timeout_s: float
    ) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._ring, self._alive, self._ring_timeout_s = ring, alive, ring_timeout_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._arrived = bytearray()
        self._messages: deque[bytearray] = deque()
        self._has_ended = False

    def read(self, timeout_s: float) -> bytearray:
        """Return the next message.  Everything that has arrived is in the ring before this returns.  ``RankError``
        (rank 0) if nothing comes within ``timeout_s``, or if the connection is closed."""
        self._take()
        if not self._messages:
            self._wait(timeout_s)
        return self._messages.popleft()

    def _wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._messages:
            if self._has_ended:
                self._alive()  # raises if it is known why
                raise RankError(0, _GONE)
            if not self._poll.poll(1000 * min(_ALIVE_CHECK_S, max(0.0, deadline_s - time.monotonic()))):
                if time.monotonic() >= deadline_s:
                    raise RankError(0, f"sent no step plan within {timeout_s:g} s")
                if not self._alive():
                    raise RankError(0, "sent no step plan: its process is gone")
            self._take()

    def _take(self) -> None:
        """Pass on the complete messages that have arrived, and keep them for this rank."""
        while not self._has_ended:
            try:
                data = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._has_ended = not data
            self._arrived += data
            self._split()
            if len(data) < _CHUNK_BYTES:
                return

    def _split(self) -> None:
        while len(self._arrived) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived)
            if length > _MAX_BYTES:
                raise RankError(0, f"sent a step plan of {length} bytes, more than {_MAX_BYTES}")
            end = _LENGTH.size + length
            if len(self._arrived) < end:
                return
            message = self._arrived[_LENGTH.size : end]
            del self._arrived[:end]
            if self._ring is not None:
                self._ring.write(message, self._ring_timeout_s)
            self._messages.append(message)

    def close(self) -> None:
        """Close the connection and the ring."""
        self._socket.close()
        if self._ring is not None:
            self._ring.close()
