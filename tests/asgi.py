"""The server's application in this process and event loop, in front of an engine in a thread.

``Exchange`` is one client: it may leave after any event, and may read at any speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from tests.fake_engine import AnyEngine, ServiceThread, fake_service
from tp_engine.api.async_llm import AsyncLLM
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.state import ServerState

DEADLINE_S = 100.0
POLL_S = 0.002


@dataclass
class Reply:
    """A whole answer; ``events`` is the data of its server-sent events."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        lines = [line for line in self.content.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


@dataclass
class Exchange:
    """One running request: parts of the answer arrive in ``parts``; ``leave`` closes the client's connection.

    While ``may_read`` is cleared, the client does not read and the server's sending waits, as with a full socket.
    """

    app: FastAPI
    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    reply_headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._gone = asyncio.Event()
        self._body_taken = False
        self._task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()
        self.may_read.set()

    async def reply(self) -> Reply:
        """Wait for the end."""
        await asyncio.wait_for(asyncio.shield(self._task), DEADLINE_S)
        assert self.status is not None
        return Reply(self.status, self.reply_headers, b"".join(self.parts))

    async def ended(self) -> None:
        """Wait until the server has finished with the request, answered or not."""
        await asyncio.wait_for(asyncio.shield(self._task), DEADLINE_S)

    async def _run(self) -> None:
        path, _, query = self.path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": self.method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": self._headers(),
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        try:
            await self.app(scope, self._receive, self._send)
        except Exception:  # as in a server, a started answer stays as it is
            if self.status is None:
                raise

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Those of a client that sends JSON, unless the test gives others; an empty one is left out."""
        of_body = {"content-type": "application/json", "content-length": str(len(self.body))} if self.body else {}
        headers = {"host": "localhost"} | of_body | {name.lower(): value for name, value in self.headers.items()}
        return [(name.encode(), value.encode()) for name, value in headers.items() if value]

    async def _receive(self) -> dict[str, Any]:
        if not self._body_taken:
            self._body_taken = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.may_read.wait()
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.reply_headers = {key.decode(): value.decode() for key, value in message["headers"]}
        else:
            self.parts.append(message.get("body", b""))


@dataclass
class App:
    """The application, its state, and the engine behind it."""

    app: FastAPI
    state: ServerState
    service: ServiceThread

    def start(self, method: str, path: str, body: object = None, **headers: str) -> Exchange:
        """Begin a request; a ``body`` of bytes is sent unchanged, any other as JSON."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Exchange(self.app, method, path, raw, headers)

    async def post(self, path: str, body: object, **headers: str) -> Reply:
        return await self.start("POST", path, body, **headers).reply()

    async def get(self, path: str) -> Reply:
        return await self.start("GET", path).reply()


@contextlib.asynccontextmanager
async def served(service: ServiceThread, tokenizer: Any, config: ServerConfig | None = None) -> AsyncIterator[App]:
    """The application, connected to ``service``; nothing may be in flight at the end."""
    state = ServerState(config or ServerConfig(), ("demo", "alias"))
    llm = await AsyncLLM.connect(service.address, tokenizer=tokenizer, timeout_s=DEADLINE_S)
    state.attach(llm)
    try:
        yield App(create_app(state), state, service)
        assert llm.num_unfinished == 0, "requests in flight at the end of a test"
    finally:
        await state.close()


def run_served(
    scenario: Callable[[App], Awaitable[None]],
    engine: AnyEngine,
    tokenizer: Any,
    config: ServerConfig | None = None,
    timeout_s: float = 200.0,
) -> None:
    """Run ``scenario`` against the application over ``engine``, all within ``timeout_s``."""

    async def all_of_it() -> None:
        async with served(service, tokenizer, config) as app:
            await scenario(app)

    async def limited() -> None:
        await asyncio.wait_for(all_of_it(), timeout_s)

    with fake_service(engine) as service:
        asyncio.run(limited())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll ``condition`` until it holds."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited {DEADLINE_S:g} s for {what}"
        await asyncio.sleep(POLL_S)
