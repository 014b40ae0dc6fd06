"""The thread that publishes KV events, and its sockets.

::

    engine's thread   put() -> | queue of changes, at most max_queue_size | -> publisher's thread
                                                                                changes -> events -> message
    PUB      topic | sequence number (8 bytes, big-endian) | payload               the last buffer_steps are kept
    ROUTER   asked with: "" | first sequence number
             answers:    "" | topic | sequence number | payload     for each one kept, then    "" | "" | -1 | ""

Sequence numbers begin at 0.  One is left out where changes were lost, and so subscribers see a gap.

With a key the sockets take the password of ZMQ's mechanism PLAIN, and the thread answers libzmq's questions (ZAP) at an
inproc socket of a context of its own.  What a stranger may send is a subscription or a number; ``connections`` bounds
how much of it.
"""

from __future__ import annotations

import hmac
import os
import socket as sockets
import threading
import time
from collections import deque

import zmq

from tp_engine.config import EngineConfig
from tp_engine.engine.feature import EngineFeature
from tp_engine.errors import ConfigError
from tp_engine.features.kv_events.connections import ConnectionGuard
from tp_engine.features.kv_events.feature import KVEventCounters
from tp_engine.features.kv_events.mirror import CacheMirror, encode
from tp_engine.features.kv_events.options import CONFIG_NAME, KVEventsConfig, is_of_this_host
from tp_engine.features.kv_events.scheduling import CacheChange, Rebuilt
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_MOST_CHANGES = 1024  # of a message
_GATHER_S = 0.005  # the thread holds Python's lock, for which the engine's waits: seldom and briefly
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500
_CLOSE_S = 5.0
_SILENCE_S = 10.0  # between two lines of the log about lost changes
_REPLAY_RESTS = 9  # between two replays, of what the first one took: a tenth of the thread's time at most
_LONGEST_POLL_MS = 60_000
_MOST_BYTES_IN = 4096  # of a message from a subscriber: a topic, or a number of 8 bytes
_MOST_WAITING_IN = 64  # messages of a connection
_USER = b"kv_events"
_LONGEST_KEY = 255
_ZAP = "inproc://zeromq.zap.01"


def open_publisher(config: EngineConfig) -> KVEventPublisher | None:
    """Open the publisher; None if events are off.  ``ConfigError`` if an endpoint cannot be used."""
    events = config.kv_events_config
    if events is None:
        return None
    if not events.is_on:
        logger.warning("kv_events_config is given, but there are no events: set enable_kv_cache_events to true in it")
        return None
    if not config.enable_prefix_caching:
        logger.warning(
            "kv_events_config is on, but enable_prefix_caching is off: nothing is cached, so nothing is told"
        )
    return KVEventPublisher(events, config.block_size, env.KV_EVENTS_KEY.read())


class KVEventPublisher(EngineFeature):
    """A ``KVEventSink``: publishes what it is given, with a thread of its own.  ``ConfigError`` if an endpoint cannot
    be used.

    With a ``key``, subscribers must send it, and so does this socket where it connects.
    """

    def __init__(self, config: KVEventsConfig, block_size: int, key: str = "") -> None:
        self.publish_salted = config.publish_salted
        self._mirror = CacheMirror(block_size)
        self._as_arrays = config.event_format == "array"
        self._topic = config.topic.encode()
        self._max_changes = config.max_queue_size
        self._queue: deque[CacheChange] = deque()
        self._kept: deque[tuple[int, zmq.Frame]] = deque(maxlen=config.buffer_steps)
        self._next = self._num_batches = self._num_lost = 0
        self._next_word_s = self._next_replay_s = 0.0
        self._is_idle = self._is_closing = self._has_failed = False
        self._door = _Door(key) if key else None
        self._context = zmq.Context() if key else zmq.Context.instance()
        self._replays: zmq.Socket[bytes] | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._guards: list[ConnectionGuard] = []
        try:
            if self._door is not None:
                self._sockets.append(self._door.open(self._context))
            self._events = self._open("endpoint", zmq.PUB, config.endpoint, binds=config.binds, hwm=config.hwm)
            if config.replay_endpoint is not None:
                self._replays = self._open(
                    "replay_endpoint", zmq.ROUTER, config.replay_endpoint, binds=True, hwm=config.buffer_steps + 1
                )
        except ConfigError:
            self._close_sockets(0)
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kv_events", daemon=True)
        self._thread.start()
        logger.info(
            "KV events: %s %s, topic %r%s", "bound to" if config.binds else "connected to", self.endpoint, config.topic,
            f", replays at {self.replay_endpoint}" if self.replay_endpoint else "",
        )  # fmt: skip
        open_to_all = [one for one in (config.endpoint * config.binds, config.replay_endpoint) if one]
        if not key and not all(map(is_of_this_host, open_to_all)):
            logger.warning(
                "KV events tell all prompts to whoever reaches %s: set %s, or bind tcp://lo:PORT",
                " and ".join(one for one in open_to_all if not is_of_this_host(one)),
                env.KV_EVENTS_KEY.name,
            )

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
        if self._door is not None:
            poller.register(self._door.socket, zmq.POLLIN)
        try:
            while self._queue or not self._is_closing:
                if self._queue and not self._is_closing:
                    time.sleep(_GATHER_S)
                self._publish()
                self._is_idle = True  # before the look at the queue, so that no change comes unseen
                rest_s = max(0.0, self._next_replay_s - time.monotonic())
                if self._replays is not None:
                    poller.modify(self._replays, 0 if rest_s else zmq.POLLIN)
                idle_ms = min(1 + int(rest_s * 1000), _LONGEST_POLL_MS) if rest_s else None
                ready = dict(poller.poll(0 if self._queue or self._is_closing else idle_ms))
                self._is_idle = False
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._door is not None and self._door.socket in ready:
                    self._door.answer()
                if self._replays is not None and self._replays in ready:
                    self._replay(self._replays)
        except Exception:
            self._has_failed = True
            self._queue.clear()
            logger.exception("KV events end here, because of an error; the engine goes on")
        finally:
            self._close_sockets(_LINGER_MS)

    def _publish(self) -> None:
        """Send one message with the first changes of the queue, unless nothing comes of them."""
        changes: list[CacheChange] = []
        while self._queue and len(changes) < _MOST_CHANGES:
            changes.append(self._queue.popleft())
        if any(isinstance(change, Rebuilt) and change.is_behind_gap for change in changes):
            self._next += 1
        if not (events := self._mirror.events(changes)):
            return
        payload = zmq.Frame(encode(time.time(), events, as_arrays=self._as_arrays))  # all that wait for it share it
        self._num_batches += 1
        self._events.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._kept.append((self._next, payload))
        self._next += 1

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer one request, after which others wait a while; one that is malformed is ignored."""
        begun_s = time.monotonic()
        client, *frames = socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            logger.debug("KV events: a replay was asked for with something else than a number of 8 bytes")
            return
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._kept:
            if number >= first:
                socket.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        socket.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)
        ended_s = time.monotonic()
        self._next_replay_s = ended_s + _REPLAY_RESTS * (ended_s - begun_s)

    def _open(self, name: str, kind: int, endpoint: str, *, binds: bool, hwm: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(hwm)
        socket.rcvhwm = _MOST_WAITING_IN
        socket.maxmsgsize = _MOST_BYTES_IN
        socket.ipv6 = "[" in endpoint or ":::" in endpoint
        if self._door is not None:
            self._door.guard(socket, binds=binds)
        if binds and endpoint.startswith("tcp:"):  # others are of this user, or of this process
            self._guards.append(ConnectionGuard(socket))
        try:
            if binds and _is_answered(endpoint):  # which zmq would take away from the other process
                raise zmq.ZMQError(zmq.EADDRINUSE)
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            remedy = "give another one" if error.errno == zmq.EADDRINUSE else "give one that this host has"
            why = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"{CONFIG_NAME} has the {name} {endpoint}, which cannot be used: {why}; {remedy}"
            ) from error
        return socket

    def _close_sockets(self, linger_ms: int) -> None:
        for socket in reversed(self._sockets):
            socket.close(linger_ms)
        for guard in self._guards:
            guard.join(_CLOSE_S)
        if self._door is not None:
            self._context.term()


class _Door:
    """Who may connect: those with the key.  ``socket`` is where libzmq asks (RFC 27, ZAP)."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        if len(self._key) > _LONGEST_KEY:
            raise ConfigError(
                f"{env.KV_EVENTS_KEY.name} has {len(self._key)} bytes; it must have at most {_LONGEST_KEY}, so that "
                "ZMQ can carry it"
            )

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """Open the socket; must come before any that is guarded."""
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP)
        return self.socket

    def guard(self, socket: zmq.Socket[bytes], *, binds: bool) -> None:
        """Let ``socket`` ask for the key if it ``binds``, else send it."""
        if binds:
            socket.plain_server = True
            socket.zap_domain = CONFIG_NAME.encode()
        else:
            socket.plain_username, socket.plain_password = _USER, self._key

    def answer(self) -> None:
        """Answer one question of libzmq."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        given = credentials[1] if mechanism == b"PLAIN" and len(credentials) == 2 else b""
        code = b"200" if hmac.compare_digest(given, self._key) else b"400"
        self.socket.send_multipart((version, request, code, b"", b"", b""))


def _is_answered(endpoint: str) -> bool:
    """Whether a process listens at a Unix socket."""
    path = endpoint.removeprefix("ipc://")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            return path != endpoint and probe.connect_ex(path) == 0
        except OSError:  # it is not a path
            return False


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
