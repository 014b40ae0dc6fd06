"""One end of a connected Unix socket that carries whole messages, without a thread in between.

::

    on the wire    [ 8 bytes: length ][ message ][ 8 bytes: length ][ message ] ...

Nothing here waits: an event loop or a poll says when there is something to do.  Each thread between two processes would
cost a message some 50 microseconds.
"""

import contextlib
import socket
from collections import deque

_LENGTH = 8
_ROOM = 1 << 18  # bytes; more than a Unix socket's buffer holds by default
_MANY = 64  # parts given to the kernel in one call


class MessageSocket:
    """Takes over ``connected``.  ``ended`` is set once the peer has left and all that it sent has been returned."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._data = bytearray(_ROOM)
        self._num_bytes = 0  # of ``_data``: the beginning of a message whose rest has not arrived
        self._unsent: deque[memoryview] = deque()
        self.ended = False

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self._socket.fileno()

    @property
    def is_amid(self) -> bool:
        """Whether a part of a message has arrived."""
        return self._num_bytes > 0

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has something to do."""
        return bool(self._unsent)

    def receive(self) -> list[bytes]:
        """Return the whole messages among what one read gives."""
        try:
            with memoryview(self._data) as view:
                num_new = self._socket.recv_into(view[self._num_bytes :])
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:  # the peer left before it had read all
            num_new = 0
        self._num_bytes += num_new
        self.ended = num_new == 0
        return self._cut()

    def send(self, message: bytes) -> None:
        """Send a message, as far as the kernel takes it now; ``flush`` sends the rest.  Nothing is sent to a peer that
        has left: reading tells of that."""
        self._unsent += (memoryview(len(message).to_bytes(_LENGTH, "little")), memoryview(message))
        self.flush()

    def flush(self) -> None:
        """Send more of what is left."""
        while self._unsent:
            parts = [self._unsent[place] for place in range(min(_MANY, len(self._unsent)))]
            try:
                num_sent = self._socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._unsent.clear()
                return
            while self._unsent and num_sent >= len(self._unsent[0]):
                num_sent -= len(self._unsent.popleft())
            if num_sent:
                self._unsent[0] = self._unsent[0][num_sent:]

    def close(self) -> None:
        """Leave; the peer may read what has been sent.  A forked child that has the descriptor too keeps nothing
        open."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _cut(self) -> list[bytes]:
        """The whole messages of ``_data``, which then begins with the next one and has room for all of it."""
        messages, data, begin, room = [], self._data, 0, _ROOM
        while self._num_bytes - begin >= _LENGTH:
            end = begin + _LENGTH + int.from_bytes(data[begin : begin + _LENGTH], "little")
            if end > self._num_bytes:
                room = max(room, end - begin)
                break
            messages.append(bytes(memoryview(data)[begin + _LENGTH : end]))
            begin = end
        if begin or room > len(data):
            self._num_bytes -= begin
            rest = data[begin : begin + self._num_bytes]
            if room != len(data):
                self._data = bytearray(room)
            self._data[: self._num_bytes] = rest
        return messages
