"""A real frontend process in front of a ``FakeEngine`` in the test's own process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import msgspec

from tests.fake_engine import MODEL_INFO, FakeEngine, ServiceThread, fake_service
from tp_engine.config import DEMO_MODEL
from tp_engine.requests.request import EngineRequest
from tp_engine.server.config import ServerConfig
from tp_engine.server.frontend_process import FrontendSettings, end_frontend, start_frontend
from tp_engine.server.listener import listener_url, open_listener

DEADLINE_S = 120.0
END_OF_TURN = 258
# The demo model's tokenizer: one token per byte, and a chat template.
INFO = msgspec.structs.replace(
    MODEL_INFO, model=str(DEMO_MODEL), tokenizer=str(DEMO_MODEL), vocab_size=263, eos_token_ids=(END_OF_TURN,)
)


def repeat_prompt(request: EngineRequest) -> list[int]:
    """The prompt again, then the end; a prompt of one token is repeated until ``max_tokens``."""
    if len(request.prompt_token_ids) == 1:
        return request.prompt_token_ids * (request.params.max_tokens or 1)
    return [*request.prompt_token_ids, END_OF_TURN]


def new_engine(step_delay_s: float = 0.0) -> FakeEngine:
    return FakeEngine(repeat_prompt, step_delay_s=step_delay_s, model_info=INFO)


@dataclass(frozen=True)
class RunningServer:
    """A ready server, and the engine behind it."""

    url: str
    engine: FakeEngine
    service: ServiceThread
    process: subprocess.Popen[bytes]
    client: httpx.Client

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return self.client.post(path, json=body, **options)  # type: ignore[arg-type]

    def wait_idle(self) -> None:
        """Wait until no request is in the engine."""
        wait_until(lambda: not self.engine.has_unfinished, "the engine to be idle")


def wait_until(condition: object, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Poll ``condition`` until it holds."""
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


def raw_request(server: RunningServer, body: object) -> socket.socket:
    """Send a completion request over a plain socket and leave the answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    kind = f"Content-Type: application/json\r\nContent-Length: {len(data)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def unfinished_body(server: RunningServer, num_bytes: int) -> socket.socket:
    """Send all but the last byte of a body of ``num_bytes`` and one, and leave the answer unread; what the server does
    not take is not sent."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    kind = f"Content-Type: application/json\r\nContent-Length: {num_bytes + 1}"
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n".encode())
    with contextlib.suppress(OSError):
        connection.sendall(b" " * num_bytes)
    return connection


@contextlib.contextmanager
def running_server(
    engine: FakeEngine | None = None,
    config: ServerConfig | None = None,
    pulse_address: str | None = None,
    hard_limit_s: float = 0.0,
    verify: ssl.SSLContext | None = None,
) -> Iterator[RunningServer]:
    """Start a server on a free port, wait until it is ready, and end it; ``verify`` is for HTTPS over a Unix socket."""
    from tests.ranks.warm_children import warm_start  # torch, which jobs with a fake engine do without

    config = config or ServerConfig(port=0)
    engine = engine or new_engine()
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(fake_service(engine))
        listener = stack.enter_context(open_listener(config))
        url = listener_url(listener, scheme="https" if config.ssl_certfile else "http")
        settings = FrontendSettings(
            server=dataclasses.asdict(config),
            model_names=["demo", "alias"],
            address=service.address,
            listener_fd=listener.fileno(),
            parent_pid=os.getpid(),
            startup_timeout_s=DEADLINE_S,
            pulse_address=pulse_address,
            hard_limit_s=hard_limit_s,
        )
        with warm_start():
            process = start_frontend(settings)
        listener.close()
        stack.callback(end_frontend, process)
        headers = {"Content-Type": "application/json"}  # also of bodies that a test writes itself
        headers |= {"Authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}
        transport = httpx.HTTPTransport(uds=config.uds, verify=verify or False) if config.uds else None
        client = stack.enter_context(
            httpx.Client(base_url=url, headers=headers, timeout=DEADLINE_S, transport=transport)
        )
        wait_until(lambda: client.get("/ready").status_code == 200, "the server to be ready")
        yield RunningServer(url=url, engine=engine, service=service, process=process, client=client)
