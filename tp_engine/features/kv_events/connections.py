"""How many connections strangers may have to a socket of KV events, and how much each may send.

libzmq bounds the size of a frame, not how many topics a connection subscribes to, nor how many frames a message has.
It keeps a tree of all topics, a node for each byte, and more where they branch, and all frames of a message until the
last one has come.  It tells who connects, with the descriptor; the kernel tells how many bytes have come in.  So a
thread looks at each TCP connection ten times a second:

::

    more than MOST_CONNECTIONS      the newest is ended
    more than MOST_BYTES from one   that one is ended, and libzmq forgets what it has sent

A subscriber that meant no harm comes again by itself; heartbeats of once a second are enough for hours, and a request
for a replay is some 12 bytes.
"""

from __future__ import annotations

import os
import socket as sockets
import struct
import threading
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from tp_engine.system.log import get_logger

logger = get_logger(__name__)

MOST_CONNECTIONS = 64
MOST_BYTES = 1 << 17  # heartbeats included
_LOOK_MS = 100
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_AT_ONCE = struct.pack("ii", 1, 0)  # of SO_LINGER: the end of a socket tells who still sends
_RECEIVED = struct.Struct("=128xQ")  # of the kernel's struct tcp_info: tcpi_bytes_received


class ConnectionGuard:
    """Watches the TCP connections to ``socket`` until it is closed; open it before the socket is bound.

    Each is known by libzmq's descriptor, and held by a copy of it, so that it is no other file meanwhile.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._held: dict[int, sockets.socket] = {}
        self._ended: set[sockets.socket] = set()  # which libzmq may hold until its next message
        address = f"inproc://kv_connections-{id(self)}"
        socket.monitor(address, _EVENTS)
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._monitor.connect(address)
        self._thread = threading.Thread(target=self._run, name="kv_connections", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, which comes with the socket's."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            is_open = True
            while is_open:
                if self._monitor.poll(_LOOK_MS if self._held else None):
                    is_open = self._take_event()
                self._look()
        finally:
            self._monitor.close(0)
            for connection in self._held.values():
                connection.close()

    def _take_event(self) -> bool:
        """Take one from libzmq; False if it was the last."""
        message = recv_monitor_message(self._monitor)
        descriptor = int(message["value"])
        if message["event"] == zmq.EVENT_MONITOR_STOPPED:
            return False
        if (former := self._held.pop(descriptor, None)) is not None:
            self._ended.discard(former)
            former.close()
        if message["event"] == zmq.EVENT_ACCEPTED:
            self._hold(descriptor, message["endpoint"].decode())
        return True

    def _hold(self, descriptor: int, endpoint: str) -> None:
        with suppress(OSError):  # which has left already
            copy = os.dup(descriptor)
            try:
                connection = sockets.socket(fileno=copy)
            except OSError:
                os.close(copy)
                raise
            if connection.family not in (sockets.AF_INET, sockets.AF_INET6) or not endpoint.endswith(
                f":{connection.getsockname()[1]}"
            ):
                connection.close()
                return
            self._held[descriptor] = connection
            if len(self._held) > MOST_CONNECTIONS:
                self._end(connection, f"{endpoint} has {MOST_CONNECTIONS} others")

    def _look(self) -> None:
        for connection in self._held.values():
            info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _RECEIVED.size)
            if len(info) == _RECEIVED.size and _RECEIVED.unpack(info)[0] > MOST_BYTES:
                self._end(connection, f"it has sent more than {MOST_BYTES:,} bytes")

    def _end(self, connection: sockets.socket, why: str) -> None:
        if connection in self._ended:
            return
        self._ended.add(connection)
        logger.warning("KV events: a connection is ended, because %s", why)
        with suppress(OSError):  # it has left
            connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _AT_ONCE)
            connection.shutdown(sockets.SHUT_RDWR)
