"""Rank 0's end of the local socket: a Unix socket in a private folder, removed once the frontend has connected.

There is exactly one peer.  The kernel closes the connection of every process that ends, so no heartbeat is needed.
"""

import contextlib
import os
import select
import socket
import tempfile
import threading

from tp_engine.engine.message_socket import MessageSocket
from tp_engine.engine.messages import ToFrontend, encode
from tp_engine.errors import ConfigError

_SCHEME = "unix://"
_MAX_PATH = 100  # bytes; sockaddr_un holds 108
_LINGER_S = 2.0
_REST_MS = 1


def new_address() -> str:
    """Return a new address: a path in a new folder that only this user may enter (mode 0700)."""
    folder = tempfile.mkdtemp(prefix="tp_engine-")
    path = os.path.join(folder, "engine")
    if len(os.fsencode(path)) > _MAX_PATH:
        os.rmdir(folder)
        raise ConfigError(f"{folder} is too long for a Unix socket; set TMPDIR to a shorter path, such as /tmp")
    return _SCHEME + path


def path_of(address: str) -> str:
    """Return the path of the socket's file."""
    return address.removeprefix(_SCHEME)


def connect(address: str) -> MessageSocket:
    """Connect to a ``ServiceSocket``; ``OSError`` while nobody waits there."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.setblocking(False)
        connected.connect(path_of(address))
    except BaseException:
        connected.close()
        raise
    return MessageSocket(connected)


def remove_address(address: str) -> None:
    """Remove the socket's file and folder; established connections stay.  Safe to call twice."""
    path = path_of(address)
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


class ServiceSocket:
    """Receives ``ToEngine`` as bytes, sends ``ToFrontend``; ``wake`` ends a wait from any thread or signal handler."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = socket.socket(socket.AF_UNIX)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._peer: MessageSocket | None = None
        self._sending = threading.Lock()
        self._rest: threading.Thread | None = None
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self.peer_gone = False
        try:
            self._listener.bind(path_of(address))
            self._listener.listen(1)
        except OSError:
            self.close()
            raise
        self._poller.register(self._listener, select.POLLIN)

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return all messages that have arrived; waits up to ``timeout_s`` for the first, for ``wake`` or for the
        peer's end.  ``peer_gone`` is set once the peer has left and all that it sent has been returned."""
        messages: list[bytes] = []
        wait_ms = int(timeout_s * 1000)
        while ready := self._poller.poll(wait_ms):
            for descriptor, _ in ready:
                if self._peer is not None and descriptor == self._peer.fileno():
                    messages += self._peer.receive()
                    self.peer_gone = self._peer.ended
                elif descriptor == self._woken.fileno():
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                else:
                    self._accept()
            if self._peer is None or self.peer_gone or not self._peer.is_amid:
                break
            wait_ms = _REST_MS  # the peer is writing the rest of a long message
        return messages

    def send(self, message: ToFrontend) -> None:
        """Send a message to the peer; a peer that has left gets nothing.  What the kernel does not take now is sent by
        a thread meanwhile."""
        peer, data = self._peer, encode(message)
        if peer is None:
            return
        with self._sending:
            peer.send(data)
            if peer.has_unsent and self._rest is None:
                self._rest = threading.Thread(target=self._send_rest, args=(peer,), name="sending", daemon=True)
                self._rest.start()

    def wake(self) -> None:
        """End the current or the next wait; does nothing after ``close``, because a signal may come at any time."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the socket, after delivering what was sent if the peer still reads."""
        rest = self._rest
        if rest is not None:
            rest.join(_LINGER_S)
        if self._peer is not None:
            with self._sending:
                self._peer.close()
        for one in (self._listener, self._woken, self._waker):
            one.close()
        remove_address(self._address)

    def _accept(self) -> None:
        """Take the one peer; the socket's file is removed, so that none is left however this process ends."""
        self._peer = MessageSocket(self._listener.accept()[0])
        self._poller.unregister(self._listener)
        self._listener.close()
        remove_address(self._address)
        self._poller.register(self._peer, select.POLLIN)

    def _send_rest(self, peer: MessageSocket) -> None:
        poller = select.poll()
        poller.register(peer, select.POLLOUT)
        while True:
            poller.poll()
            with self._sending:
                peer.flush()
                if not peer.has_unsent:
                    self._rest = None
                    return
