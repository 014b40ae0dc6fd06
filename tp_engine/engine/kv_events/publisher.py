"""The thread that publishes KV events, and its sockets.

::

    engine's thread   put() -> | queue of changes, at most max_queue_size | -> publisher's thread
                                                                                changes -> events -> message
    PUB      topic | sequence number (8 bytes, big-endian) | payload               the last buffer_steps are kept
    ROUTER   asked with: "" | first sequence number
             answers:    "" | topic | sequence number | payload     for each one kept, then    "" | "" | -1 | ""

Sequence numbers begin at 0.  One is left out where changes were lost, and so subscribers see a gap.
"""

from __future__ import annotations

import os
import socket as sockets
import threading
import time
from collections import deque

import zmq

from tp_engine.closing import Closing
from tp_engine.engine.kv_events.mirror import CacheMirror, encode
from tp_engine.errors import ConfigError
from tp_engine.kv_events import CONFIG_NAME, KVEventsConfig
from tp_engine.log import get_logger
from tp_engine.sched.kv_events import CacheChange, KVEventCounters, Rebuilt

logger = get_logger(__name__)

_MOST_CHANGES = 1024  # of a message
_GATHER_S = 0.005  # the thread holds Python's lock, for which the engine's waits: seldom and briefly
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500
_CLOSE_S = 5.0
_SILENCE_S = 10.0  # between two lines of the log about lost changes


class KVEventPublisher(Closing):
    """A ``KVEventSink``: publishes what it is given, with a thread of its own.  ``ConfigError`` if an endpoint can not
    be used."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        self.publish_salted = config.publish_salted
        self._mirror = CacheMirror(block_size)
        self._as_arrays = config.event_format == "array"
        self._topic = config.topic.encode()
        self._max_changes = config.max_queue_size
        self._queue: deque[CacheChange] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = self._num_batches = self._num_lost = 0
        self._next_word_s = 0.0
        self._is_idle = self._is_closing = self._has_failed = False
        self._events = _open("endpoint", zmq.PUB, config.endpoint, binds=config.binds, hwm=config.hwm)
        self._replays: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            try:
                self._replays = _open("replay_endpoint", zmq.ROUTER, config.replay_endpoint, binds=True, hwm=config.hwm)
            except ConfigError:
                self._events.close(0)
                raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kv_events", daemon=True)
        self._thread.start()
        logger.info(
            "KV events: %s %s, topic %r%s", "bound to" if config.binds else "connected to", self.endpoint, config.topic,
            f", replays at {self.replay_endpoint}" if self.replay_endpoint else "",
        )  # fmt: skip

    @property
    def endpoint(self) -> str:
        """Where the PUB socket is, with its port."""
        return _address(self._events)

    @property
    def replay_endpoint(self) -> str:
        """Where the ROUTER socket is; empty without one."""
        return "" if self._replays is None else _address(self._replays)

    def put(self, change: CacheChange) -> bool:
        if len(self._queue) >= self._max_changes:
            return False
        self._append(change)
        return True

    def replace(self, change: Rebuilt) -> None:
        self._num_lost += len(self._queue) + 1
        self._queue.clear()
        self._append(change)
        if time.monotonic() >= self._next_word_s:
            self._next_word_s = time.monotonic() + _SILENCE_S
            logger.warning(
                "KV events: %d changes of the cache were lost since the start, because max_queue_size %d was reached; "
                "subscribers see a gap, and get the whole cache again",
                self._num_lost,
                self._max_changes,
            )

    def counters(self) -> KVEventCounters:
        return KVEventCounters(num_batches=self._num_batches, num_lost_changes=self._num_lost)

    def close(self) -> None:
        """Publish what waits, and close the sockets."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _append(self, change: CacheChange) -> None:
        if self._has_failed or self._is_closing:
            return
        self._queue.append(change)
        if self._is_idle:
            self._is_idle = False
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        try:
            while self._queue or not self._is_closing:
                if self._queue and not self._is_closing:
                    time.sleep(_GATHER_S)
                self._publish()
                self._is_idle = True  # before the look at the queue, so that no change comes unseen
                ready = dict(poller.poll(0 if self._queue or self._is_closing else None))
                self._is_idle = False
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._replays is not None and self._replays in ready:
                    self._replay(self._replays)
        except Exception:
            self._has_failed = True
            self._queue.clear()
            logger.exception("KV events end here, because of an error; the engine goes on")
        finally:
            for socket in filter(None, (self._events, self._replays)):
                socket.close(_LINGER_MS)

    def _publish(self) -> None:
        """Send one message with the first changes of the queue, unless nothing comes of them."""
        changes: list[CacheChange] = []
        while self._queue and len(changes) < _MOST_CHANGES:
            changes.append(self._queue.popleft())
        if any(isinstance(change, Rebuilt) and change.is_behind_gap for change in changes):
            self._next += 1
        if not (events := self._mirror.events(changes)):
            return
        payload = encode(time.time(), events, as_arrays=self._as_arrays)
        self._num_batches += 1
        self._events.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._kept.append((self._next, payload))
        self._next += 1

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer one request; one that is malformed is ignored."""
        client, *frames = socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            logger.debug("KV events: a replay was asked for with something else than a number of 8 bytes")
            return
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._kept:
            if number >= first:
                socket.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        socket.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)


def _open(name: str, kind: int, endpoint: str, *, binds: bool, hwm: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(hwm)
    socket.ipv6 = "[" in endpoint or ":::" in endpoint
    try:
        if binds and _is_answered(endpoint):  # which zmq would take away from the other process
            raise zmq.ZMQError(zmq.EADDRINUSE)
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        remedy = "give another one" if error.errno == zmq.EADDRINUSE else "give one that this host has"
        why = zmq.strerror(error.errno or 0)
        raise ConfigError(f"{CONFIG_NAME} has the {name} {endpoint}, which can not be used: {why}; {remedy}") from error
    return socket


def _is_answered(endpoint: str) -> bool:
    """Whether a process listens at a Unix socket."""
    path = endpoint.removeprefix("ipc://")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            return path != endpoint and probe.connect_ex(path) == 0
        except OSError:  # it is no path
            return False


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
