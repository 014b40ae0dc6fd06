"""Connections that only wait, on plain sockets against uvicorn with each of its parsers, and the real HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from tests.e2e.frontend import INFO, running_server, wait_until
from tests.fake_engine import FakeEngine, arith
from tp_engine.server.config import ServerConfig
from tp_engine.server.connections import Connections, h11_protocol, http_protocol
from tp_engine.server.main import FrontendServer
from tp_engine.server.middleware import Checks
from tp_engine.server.request_guard import RequestGuard

WAIT_S = 20.0
HEADER_S, WRITE_S = 0.4, 1.0
LARGE = 64 << 20
GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Small:
    """A running server of a small application, and its connections."""

    port: int
    connections: Connections

    def connect(self, data: bytes = b"") -> socket.socket:
        """A new connection that has sent ``data``."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        made.sendall(data)
        return made

    def status(self, path: bytes = b"/health") -> int:
        """The status of a request over a connection of its own."""
        with self.connect(GET % path) as asked:
            return int(asked.recv(1000).split()[1])


async def application(scope: Any, receive: Any, send: Any) -> None:
    """``/large`` is one large answer, ``/endless`` has no end, ``/wait`` waits for the end, ``/body`` counts."""
    path = scope["path"]
    if path == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    if path == "/body":
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await receive()
    leaving = asyncio.ensure_future(receive())
    while path == "/endless" and not leaving.done():
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
    leaving.cancel()
    await send({"type": "http.response.body", "body": b"x" * (LARGE if path == "/large" else 2)})


@contextlib.contextmanager
def small_server(parser: str, **options: Any) -> Iterator[Small]:
    """``application`` in a thread, on a free port, over ``parser`` of uvicorn."""
    limits = {"header_timeout_s": HEADER_S, "write_timeout_s": WRITE_S, "max_connections": 8, **options}
    connections = Connections(ServerConfig(**limits))
    guarded = Checks(application, RequestGuard(ServerConfig(allowed_hosts=("*",))))
    limited = Checks(guarded, lambda scope: None if scope["path"] == "/health" else connections.check_room())
    config = uvicorn.Config(
        limited,
        http=http_protocol() if parser == "httptools" else h11_protocol(),
        lifespan="off",
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=1,
        access_log=False,
    )
    server = FrontendServer(config, connections)
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        watching = asyncio.create_task(connections.run())
        await server.serve(sockets=[listener])
        watching.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        wait_until(lambda: server.started, "the server")
        yield Small(listener.getsockname()[1], connections)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)


@pytest.fixture(scope="module", params=["h11", "httptools"])
def small(request: pytest.FixtureRequest) -> Iterator[Small]:
    with small_server(request.param) as server:
        yield server


def answer(connection: socket.socket) -> bytes:
    """A whole answer in chunks."""
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        read = connection.recv(1000)
        assert read, data
        data += read
    return data


def ends(connection: socket.socket) -> bool:
    """Whether the server ends the connection; what it still sends is read."""
    try:
        while connection.recv(1 << 20):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_requests_that_wait_on_one_connection_are_bounded(small: Small, request: pytest.FixtureRequest) -> None:
    """Oracle: the count of answers, and the end of the connection.  Some requests at once are answered in order;
    httptools would make a record of each of thousands that come in one piece of data, for seconds of the loop."""
    with small.connect(GET % b"/health" * 8) as few:
        data = b""
        while data.count(b"HTTP/1.1 200") < 8:
            data += few.recv(4096)
    if request.node.callspec.params["small"] == "httptools":
        with small.connect(GET % b"/wait" + GET % b"/health" * 1000) as many:
            assert ends(many)


def test_bodies_in_tiny_chunks_are_bounded(small: Small) -> None:
    """Oracle: the application's count of bytes, or a 400.  Tiny chunks are refused from a number on that no client's
    buffers make; large ones are as many as they like."""
    headers = b"Host: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    begin = b"POST /body HTTP/1.1\r\n" + headers + b"\r\n\r\n"
    end = b"0\r\n\r\n"
    with small.connect(begin + b"1\r\nx\r\n" * 1000 + end) as few:
        assert b"1000" in answer(few)
    with small.connect(begin + (b"10\r\n" + b"x" * 16 + b"\r\n") * 3000 + end) as large:
        assert b"48000" in answer(large)
    with small.connect(begin) as many, contextlib.suppress(ConnectionError):
        many.sendall(b"1\r\nx\r\n" * 20_000 + end)
        assert b"HTTP/1.1 400" in many.recv(1000)
        assert ends(many)


def test_idle_and_half_sent_connections_are_closed(small: Small) -> None:
    """Oracle: the header's deadline, from the first byte on: bytes that trickle in do not move it."""
    beginnings = (b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\nX-", GET % b"/health" + b"GET /he")
    waiting = [small.connect(data) for data in beginnings]
    trickling, stop = small.connect(GET % b"/health" + b"POST /x HTTP/1.1\r\n"), threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.1):
                trickling.sendall(b"X-A: b\r\n")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        assert all(ends(one) for one in (*waiting, trickling))
    finally:
        stop.set()
        thread.join()
    wait_until(lambda: len(small.connections) == 0, "their end")


def test_a_connection_between_two_requests_and_one_with_a_request_stay(small: Small) -> None:
    """Oracle: both are there after several times the header's deadline."""
    with small.connect(GET % b"/health") as between, small.connect(GET % b"/wait") as within:
        assert b"200" in answer(between)
        time.sleep(4 * HEADER_S + 1)
        between.sendall(GET % b"/health")
        assert b"200" in answer(between)
        assert len(small.connections) == 2
        within.settimeout(0.1)
        assert not ends(within)


@pytest.mark.parametrize("path", [b"/endless", b"/large"])
def test_a_client_that_does_not_read_is_disconnected(path: bytes, small: Small) -> None:
    """Oracle: the write deadline, whether the answer is still written or waits as a whole; one that reads gets all."""
    with small.connect(GET % path):
        wait_until(lambda: len(small.connections) == 1, "the connection")
        wait_until(lambda: len(small.connections) == 0, "its end")
    with small.connect(GET % b"/large") as slow:
        size, began_s = 0, time.monotonic()
        while size < LARGE:
            size += len(slow.recv(1 << 20))
            if time.monotonic() - began_s < 2 * WRITE_S:
                time.sleep(0.05)
        assert time.monotonic() - began_s > WRITE_S


def test_connections_without_a_request_make_room(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the oldest ones go, one with a request stays, everybody is served; one line in the log."""
    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        within = stack.enter_context(small.connect(GET % b"/wait"))
        for _ in range(100):
            stack.enter_context(small.connect())
            assert small.status(b"/") == 200
        assert len(small.connections) <= 8
        within.settimeout(0.1)
        assert not ends(within)
    assert caplog.text.count("are open") <= 1
    wait_until(lambda: len(small.connections) == 0, "their end")


def test_health_checks_pass_where_every_connection_has_a_request(small: Small) -> None:
    """Oracle: 503 with Retry-After and a closed connection, but 200 for health, until others end."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(small.connect(GET % b"/wait")) for _ in range(8)]
        wait_until(lambda: len(small.connections) == 8, "all connections")
        for _ in range(5):
            assert (small.status(b"/"), small.status()) == (503, 200)
        with small.connect(GET % b"/") as refused:
            text = b"".join(iter(lambda: refused.recv(2000), b"")).lower()  # up to the end of the connection
            assert b"retry-after" in text and b"connection: close" in text and b"too_many_connections" in text
        held[0].close()
        wait_until(lambda: len(small.connections) < 8, "one to end")
        assert small.status(b"/") == 200
    wait_until(lambda: len(small.connections) == 0, "their end")


def test_descriptors_that_run_out_are_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: with no descriptor left nothing is accepted and the log has one line; then the server goes on."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with small_server("h11", max_connections=1000) as server, caplog.at_level(logging.WARNING):
        clients = [socket.socket() for _ in range(20)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, before[1]))
        try:
            for client in clients:
                client.settimeout(WAIT_S)
                client.connect(("127.0.0.1", server.port))
            time.sleep(2.5)  # asyncio tries again every second
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        wait_until(lambda: server.status() == 200, "the server to go on")
        for client in clients:
            client.close()
        assert caplog.text.count("cannot be accepted") == 1 and "Traceback" not in caplog.text
        time.sleep(1.2)  # asyncio's timers for that must not outlive the socket


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"a"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X: b\r\n"),
        (b"GET /", b"a"),
        (b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
         b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"X: b\r\n"),
    ],
    ids=["long", "many", "path", "trailers"],
)  # fmt: skip
def test_headers_are_bounded(begin: bytes, part: bytes, small: Small) -> None:
    """Oracle: the server ends the connection long before 64 MiB, whatever the parser."""
    piece, num_sent = part * (65536 // len(part)), 0
    with small.connect(begin) as one, contextlib.suppress(ConnectionError):
        while num_sent < LARGE:
            one.sendall(piece)
            num_sent += len(piece)
    assert num_sent < LARGE


def test_large_bodies_in_small_chunks_are_no_headers(small: Small) -> None:
    """Oracle: the sum of the body's bytes: chunks of 16 to 22 bytes, which is as small as so many may be, and one of
    4 MiB, with short extensions."""
    chunks = [b"x" * (16 + i % 7) for i in range(60_000)] + [b"y" * (4 << 20)]
    body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with small.connect(head + body) as one:
        assert str(sum(map(len, chunks))).encode() in answer(one)


def test_no_request_hides_in_a_body_with_two_lengths(small: Small) -> None:
    """Oracle: RFC 9112 6.1: one answer, 400, and the connection is closed, in one write and in two."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    for first, second in ((head + b"0\r\n\r\n" + GET % b"/health", b""), (head, b"0\r\n\r\n" + GET % b"/health")):
        with small.connect(first) as one, contextlib.suppress(ConnectionError):
            one.sendall(second)
            text = b"".join(iter(lambda one=one: one.recv(1000), b""))  # type: ignore[misc]
            assert text.startswith(b"HTTP/1.1 400 ") and text.count(b"HTTP/1.1") == 1


def test_requests_that_are_none_are_one_line_in_the_log(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the HTTP library's warning, once in ten seconds at most; errors are not held back."""
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with small.connect(b"NONSENSE\r\n\r\n") as one:
                assert b" 400 " in one.recv(1000)
        for _ in range(2):
            logging.getLogger("uvicorn.error").error("an error")
    assert caplog.text.count("Invalid HTTP request") <= 1 and caplog.text.count("an error") == 2


def test_a_stream_that_nobody_reads_is_aborted() -> None:
    """Oracle: the engine hears of it long before the request would end, and the stream of another client goes on."""
    engine = FakeEngine(arith, step_delay_s=0.02, model_info=INFO)
    body = {"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True, "n": 32, "logprobs": 20}
    with running_server(engine, ServerConfig(port=0, write_timeout_s=1.0)) as server:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(WAIT_S)
            deaf.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            deaf.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            wait_until(lambda: len(engine.added) == 1, "the request")
            small = {"prompt": "y", "max_tokens": 100, "stream": True, "ignore_eos": True}
            with server.client.stream("POST", "/v1/completions", json=small) as stream:
                assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
            wait_until(lambda: engine.aborted != [], "the abort")
        server.wait_idle()
        wait_until(lambda: server.client.get("/load").json()["server_load"] == 0, "its place")
