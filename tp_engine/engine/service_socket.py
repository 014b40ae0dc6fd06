"""Rank 0's end of the local socket: a Unix socket in a private folder, removed once the frontend has connected.

There is exactly one peer, so both ends are zmq PAIR sockets.  The kernel closes the connection of every process that
ends, and the socket's monitor reports it, so no heartbeat is needed.
"""

import contextlib
import os
import socket
import tempfile

import zmq

from tp_engine.engine.messages import ToFrontend, encode
from tp_engine.errors import ConfigError

_SCHEME = "ipc://"
_MAX_PATH = 100  # bytes; sockaddr_un holds 108
_LINGER_MS = 2000


def new_address() -> str:
    """Return a new address: a path in a new folder that only this user may enter (mode 0700)."""
    folder = tempfile.mkdtemp(prefix="tp_engine-")
    path = os.path.join(folder, "engine")
    if len(os.fsencode(path)) > _MAX_PATH:
        os.rmdir(folder)
        raise ConfigError(f"{folder} is too long for a Unix socket; set TMPDIR to a shorter path, such as /tmp")
    return _SCHEME + path


def remove_address(address: str) -> None:
    """Remove the socket's file and folder; established connections stay.  Safe to call twice."""
    path = address.removeprefix(_SCHEME)
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


class ServiceSocket:
    """Receives ``ToEngine`` as bytes, sends ``ToFrontend``; ``wake`` ends a wait from any thread or signal handler."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = _LINGER_MS
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._woken):
            self._poller.register(source, zmq.POLLIN)
        self.peer_gone = False
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return all messages that have arrived; waits up to ``timeout_s`` for the first, for ``wake`` or for the
        peer's end.  ``peer_gone`` is set once the peer has left and all that it sent has been returned."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        gone = self._monitor in ready
        messages = self._take() if gone or self._socket in ready else []
        self.peer_gone = self.peer_gone or gone
        return messages

    def send(self, message: ToFrontend) -> None:
        """Queue a message for the peer; sets ``peer_gone`` if the peer has left."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.peer_gone = True

    def wake(self) -> None:
        """End the current or the next wait; does nothing after ``close``, because a signal may come at any time."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def hide(self) -> None:
        """Remove the socket's file, so that none is left however this process ends."""
        remove_address(self._address)

    def close(self) -> None:
        """Close the socket, after delivering what was sent if the peer still reads."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._woken.close()
        self._waker.close()
        self.hide()

    def _take(self) -> list[bytes]:
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self._socket.recv(zmq.NOBLOCK))
        return messages
