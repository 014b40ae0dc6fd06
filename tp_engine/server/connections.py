"""How many connections the HTTP server has, and how long one may wait for its client.

::

    a connection                                   ends
    without a request: nothing, or half a header   header_timeout_s after it was opened or began the header
    with a request whose body does not come        body_timeout_s later, with 408 (bodies.py)
    whose client reads its answer too slowly       write_timeout_s later; the request is aborted
    between two requests                           _KEEP_ALIVE_S later (main.py)
    beyond max_connections                         the oldest ones without a request make room; if all have one, it gets
                                                   503, but for health checks

uvicorn keeps the set of its connections in ``Connections``; it works with each of uvicorn's HTTP parsers.
"""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import resource
import time
from collections.abc import Iterator, MutableSet
from dataclasses import dataclass
from typing import Any, TypeAlias

from tp_engine.api.openai.errors import HttpError
from tp_engine.server.config import ServerConfig
from tp_engine.server.middleware import TOO_MANY_CONNECTIONS
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

# The HTTP library logs each invalid request.
_LOGS = (logger, logging.getLogger("uvicorn.error"))

Connection: TypeAlias = Any
"""uvicorn's protocol object of one connection, of any of its parsers."""

_LOOK_S = 1.0
_LEAST_READ_BYTES = 4096
_ENDED_AT_ONCE = 32
_LOG_EVERY_S = 10.0
_MAX_HEADER_BYTES = 65536
_MOST_TINY_CHUNKS = 1024  # of a body, whose chunks are below
_TINY_CHUNK_BYTES = 16  # on average
_MOST_WAITING = 16  # requests that a client sends before it has the first one's answer
_RESERVED_DESCRIPTORS = 128
_RETRY_AFTER_S = 1
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True)
class _ClientWait:
    """Since when a connection waits for its client to read ``num_bytes``, or, if that is 0, to send a header."""

    since_s: float
    num_bytes: int

    def is_over(self, num_bytes: int) -> bool:
        """Whether the client has done something since: ``num_bytes`` wait for it now."""
        return bool(num_bytes) != bool(self.num_bytes) or self.num_bytes - num_bytes >= _LEAST_READ_BYTES


class Connections(MutableSet[Connection]):
    """The open connections, the oldest first."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._most = config.max_connections
        self._waits: dict[Connection, _ClientWait | None] = {}

    def fit_descriptors(self) -> None:
        """Raise this process's limit on descriptors as far as possible, and reserve some for other things."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        free = hard - len(os.listdir("/proc/self/fd"))
        self._most = max(1, min(self._most, free - min(_RESERVED_DESCRIPTORS, free // 2)))

    @property
    def are_too_many(self) -> bool:
        """Whether there are too many, although those without a request have ended."""
        return len(self._waits) > self._most

    def check_room(self) -> None:
        """Raise ``HttpError`` 503 while there are too many."""
        if self.are_too_many:
            text = "the server has too many connections; try again later"
            raise HttpError(503, text, code=TOO_MANY_CONNECTIONS, retry_after_s=_RETRY_AFTER_S)

    async def run(self) -> None:
        """Check the connections every second, until cancelled."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        with seldom():
            while True:
                self.end_late_ones(time.monotonic())
                await asyncio.sleep(_LOOK_S)

    def end_late_ones(self, now_s: float) -> None:
        """Close those that have waited too long for their clients by ``now_s``."""
        for connection, wait in list(self._waits.items()):
            num_bytes = _unread_bytes(connection)
            awaits_header = _has_no_request(connection) and connection.timeout_keep_alive_task is None
            if not num_bytes and not awaits_header:  # it has sent more than a part of a header
                self._waits[connection] = None
            elif wait is None or wait.is_over(num_bytes):
                self._waits[connection] = _ClientWait(now_s, num_bytes)
            elif now_s - wait.since_s >= (self._config.write_timeout_s if num_bytes else self._config.header_timeout_s):
                connection.transport.abort()

    def add(self, value: Connection) -> None:
        self._waits[value] = None
        if self.are_too_many:
            self._make_room(value)

    def discard(self, value: Connection) -> None:
        self._waits.pop(value, None)

    def __contains__(self, value: object) -> bool:
        return value in self._waits

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._waits)

    def __len__(self) -> int:
        return len(self._waits)

    def _make_room(self, newest: Connection) -> None:
        """Close some of the oldest connections without a request: another one may come with each turn of the loop."""
        idle = (one for one in self._waits if one is not newest and _has_no_request(one) and not _unread_bytes(one))
        for connection in list(itertools.islice(idle, min(_ENDED_AT_ONCE, len(self._waits) // 8 + 1))):
            del self._waits[connection]
            connection.transport.abort()
        logger.warning(
            "%d connections are open, the most that may be: the oldest without a request are closed", self._most
        )

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Asyncio repeats a failed accept after a second, on each of its sockets."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES:
            logger.warning("a connection cannot be accepted (%s); it is tried again", error.strerror)
        else:
            loop.default_exception_handler(context)


@contextlib.contextmanager
def seldom() -> Iterator[None]:
    """Within, the same warning on connections is logged at most every ten seconds: strangers can provoke it."""
    only = _Seldom()
    for log in _LOGS:
        log.addFilter(only)
    try:
        yield
    finally:
        for log in _LOGS:
            log.removeFilter(only)


class _Seldom(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._next_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if record.levelno != logging.WARNING or now_s >= self._next_s.get(record.msg, 0.0):
            self._next_s[record.msg] = now_s + _LOG_EVERY_S
            return True
        return False


class _Chunks:
    """The chunks of a request's body.  Each costs the event loop some microseconds however small it is."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Note a new request."""
        self._count = self._num_bytes = 0

    def add(self, num_chunks: int, num_bytes: int) -> str:
        """Note chunks and bytes; return what is wrong with them, or nothing."""
        self._count += num_chunks
        self._num_bytes += num_bytes
        num_whole = self._count - 1  # the last one may still come
        if num_whole < _MOST_TINY_CHUNKS or self._num_bytes >= num_whole * _TINY_CHUNK_BYTES:
            return ""
        return f"a body of more than {_MOST_TINY_CHUNKS} chunks has less than {_TINY_CHUNK_BYTES} bytes in each"


def http_protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol for httptools where that is installed (extra ``fast``), else for h11, with limits on headers,
    on tiny chunks, and on requests that wait for the answers of others.

    h11 has a limit for headers of its own, and reads one request at a time.  httptools collects headers and trailers of
    any size, and all requests of a piece of data at once: 7,000 fit, and each takes 50 us of the event loop.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return h11_protocol()

    class BoundedHeaders(HttpToolsProtocol):
        _num_bytes = 0  # of the present header, trailer or chunk's extension, in earlier pieces of data
        _phase = 0  # odd within one of these

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._chunks = _Chunks()

        def data_received(self, data: bytes) -> None:
            if self._num_bytes > _MAX_HEADER_BYTES:
                self.send_400_response(f"A header has more than {_MAX_HEADER_BYTES} bytes.")
                return
            phase = self._phase
            super().data_received(data)
            is_same = phase == self._phase and phase % 2 == 1
            self._num_bytes = self._num_bytes + len(data) if is_same else 0

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= _MOST_WAITING:
                raise ValueError(f"more than {_MOST_WAITING} requests wait for an answer")
            self._phase |= 1
            self._chunks.begin()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._phase += 1
            super().on_headers_complete()

        def on_chunk_header(self) -> None:
            self._phase |= 1
            if wrong := self._chunks.add(1, 0):
                raise ValueError(wrong)

        def on_body(self, body: bytes) -> None:
            self._phase += self._phase % 2
            self._chunks.add(0, len(body))
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._phase += self._phase % 2
            super().on_message_complete()

    return BoundedHeaders


def h11_protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol for h11, with a limit on tiny chunks."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedConnection(h11.Connection):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._chunks = _Chunks()

        def next_event(self) -> Any:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks.begin()
            elif isinstance(event, h11.Data) and (wrong := self._chunks.add(event.chunk_start, len(event.data))):
                raise h11.RemoteProtocolError(wrong)
            return event

    class BoundedChunks(H11Protocol):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.conn = BoundedConnection(h11.SERVER)

    return BoundedChunks


def _has_no_request(connection: Connection) -> bool:
    return connection.cycle is None or connection.cycle.response_complete


def _unread_bytes(connection: Connection) -> int:
    """The bytes of an answer that the client has not read yet; 0 while more may be written."""
    if connection.transport is None or not (connection.flow.write_paused or _has_no_request(connection)):
        return 0
    return int(connection.transport.get_write_buffer_size())
