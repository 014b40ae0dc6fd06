"""The frontend process: ``python -m tp_engine.server.main`` with its settings as JSON on standard input."""

import asyncio
import contextlib
import gc
import importlib
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.batches.store import BatchStore
from tp_engine.engine.processes import die_with_parent
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import ConfigError, EngineDeadError
from tp_engine.ipc.pulse import Pulse
from tp_engine.server.app import create_app
from tp_engine.server.batch_worker import BatchWorker
from tp_engine.server.config import NO_BATCHES, ServerConfig
from tp_engine.server.connections import Connections, http_protocol
from tp_engine.server.frontend_process import FrontendSettings
from tp_engine.server.listener import BACKLOG, listener_url
from tp_engine.server.state import ServerState
from tp_engine.system import env
from tp_engine.system.log import configure_logging, get_logger

logger = get_logger(__name__)

# Handles of the one listening socket.  In one iteration of the loop libuv accepts one connection per handle, asyncio up
# to ``backlog``.  A burst must neither fill an iteration nor keep a health check waiting in the kernel's queue.
_NUM_ACCEPTORS = 16
_ACCEPTS_PER_HANDLE = 2
_KEEP_ALIVE_S = 65
_TEMPORARY_BYTES = 1 << 30  # of files and batches without a folder: temporary files may be in memory
_CLOSE_S = 2
_PULSE_S = 0.5
_LAST_ANSWERS_S = 3.0
_LOCK_S = 0.0005
_NOTIFY_S = 1.0


_TO_TRY = {
    "none": ("/v1/chat/completions", '{"messages":[{"role":"user","content":"12+34="}]}'),
    "embed": ("/v1/embeddings", '{"input":"Tea is a drink."}'),
    "classify": ("/rerank", '{"query":"what is tea","documents":["Tea is a drink.","A fox jumps."]}'),
    "head": ("/pooling", '{"input":"Tea is a drink."}'),
}
"""A first request to try, a path and a body, by the model's use: ``EngineConfig.convert``, or the head of scores."""


class FrontendServer(uvicorn.Server):
    """uvicorn without its signal handlers: ``Frontend`` decides when the server ends."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.server_state.connections = connections  # type: ignore[assignment]  # used as a set

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a longer queue of new connections than the loop accepts in one iteration."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers as they are."""
        yield


class Frontend:
    """Serves while the engine loads (503), while it runs, and after a stop signal until the last answer."""

    def __init__(self, settings: FrontendSettings, config: ServerConfig, listener: socket.socket) -> None:
        self._settings = settings
        self._config = config
        self._listener = listener
        self._state = ServerState(config, tuple(settings.model_names))
        self._app = create_app(self._state)
        self._store: BatchStore | None = None
        self._batches: BatchWorker | None = None
        self._stop_asked = asyncio.Event()
        if settings.pulse_address is not None:
            self._state.pulse = Pulse.open(settings.pulse_address)

    async def run(self) -> int:
        """Serve until told to stop (0), or until the engine has ended without being told (1)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_asked.set)
        server = FrontendServer(_uvicorn_config(self._app, self._state.config), self._state.connections)
        self._state.connections.fit_descriptors()
        acceptors = [self._listener, *(self._listener.dup() for _ in range(_NUM_ACCEPTORS - 1))]
        serving = loop.create_task(server.serve(sockets=acceptors))
        attending = loop.create_task(self._attend_engine())
        stopping = loop.create_task(self._stop_asked.wait())
        watching = loop.create_task(self._state.watch.run())
        ending = loop.create_task(self._state.connections.run())
        await asyncio.wait({serving, attending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        engine_ended = attending.done()
        _tell_systemd("STOPPING=1")
        self._state.limit.is_draining = True
        await self._state.limit.wait_idle(_CLOSE_S if engine_ended else self._config.shutdown_timeout_s)
        server.should_exit = True
        await serving
        for task in (attending, stopping, watching, ending):
            task.cancel()
        await asyncio.gather(attending, stopping, watching, ending, return_exceptions=True)
        if self._batches is not None:
            await self._batches.stop()
        if self._store is not None:
            self._store.close()
        await self._state.close()
        return 0 if self._stop_asked.is_set() else 1

    async def _attend_engine(self) -> None:
        """Connect, announce that the server is ready, and return when the engine has ended."""
        settings = self._settings
        try:
            self._store = await asyncio.to_thread(open_store, self._config)
            tokenizer = await asyncio.to_thread(_load_early, settings.tokenizer)  # while the engine loads the weights
            llm = await AsyncLLM.connect(settings.address, tokenizer=tokenizer, timeout_s=settings.startup_timeout_s)
        except (ConfigError, EngineDeadError) as error:
            logger.error("%s", error)
            return
        await self._state.open(llm)
        if self._store is not None:
            self._app.state.batches = self._batches = BatchWorker(self._state, self._store)
        gc.collect()
        gc.freeze()  # full collections, which stop everything, then skip the libraries' objects
        self._announce()
        _tell_systemd("READY=1")
        await self._await_end(llm)

    async def _await_end(self, llm: AsyncLLM) -> None:
        """Wait until the engine has ended, or has been silent for so long that it counts as ended."""
        pulse = self._state.pulse
        while not await llm.engine.wait_ended(timeout_s=_PULSE_S):
            if pulse is not None and pulse.silence_s() > self._settings.hard_limit_s:
                reason = f"rank 0 has shown no sign of life for {pulse.silence_s():.0f} s"
                logger.error("%s; its requests are given up", reason)
                llm.engine.give_up(reason)

    def _announce(self) -> None:
        config = self._config
        url = listener_url(self._listener, config.root_path, scheme="https" if config.ssl_certfile else "http")
        socket_file = "" if config.uds is None else f"--unix-socket {config.uds} "
        names = ", ".join(self._state.model_names)
        key = "" if not config.api_keys else "-H 'Authorization: Bearer YOUR_KEY' "
        model = self._state.healthy_llm().model_info
        path, body = _TO_TRY["head" if model.convert == "classify" and not model.generates_text else model.convert]
        with contextlib.suppress(OSError):  # a full disk, or a pipe without a reader: serve all the same
            print(
                f"serving {names} at {url}, try:\n"
                f"  curl {socket_file}{url}{path} {key}-H 'Content-Type: application/json' -d '{body}'",
                flush=True,
            )


def open_store(config: ServerConfig) -> BatchStore | None:
    """The store of files and batches: in the given folder, or in one that is deleted with the server's end.

    None if there is to be none, or no folder can be made.  Raises ``ConfigError`` for a given folder that is unusable.
    """
    folder, max_bytes = config.batch_storage_dir, config.batch_max_storage_bytes
    if folder == NO_BATCHES:
        return None
    if folder is None:
        max_bytes = min(max_bytes, _TEMPORARY_BYTES)
        try:
            tempfile.gettempdir()
        except OSError as error:
            logger.warning("files and batches are not offered: %s; give a folder with --batch-storage-dir", error)
            return None
    return BatchStore(
        None if folder is None else Path(folder).expanduser(),
        retention_s=3600 * config.batch_retention_hours,
        max_bytes=max_bytes,
    )


def _load_early(source: str | None) -> Any | None:
    """The tokenizer of a local folder; None without one, and for a hub model, which rank 0 may be downloading."""
    return load_tokenizer(source) if source is not None and Path(source).expanduser().is_dir() else None


def _tell_systemd(state: str) -> None:
    """Send the service's state to the socket that systemd names, if any; a name with a leading @ is an abstract one."""
    address = env.NOTIFY_SOCKET.read()
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(_NOTIFY_S)
        try:
            sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            logger.warning("systemd was not told %s: NOTIFY_SOCKET %s: %s", state, address, error)


def _do_without_torch() -> None:
    """Hide torch from transformers, which imports it where it is installed; the tokenizers do not need it.

    The import would take longer than the rest of this process's start, and a few hundred MB.
    """
    env.silence_advice()
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it then fails


def share_interpreter() -> None:
    """Have this process's threads release the interpreter's lock after ``_LOCK_S``.

    While a thread makes an answer of megabytes, the event loop would wait Python's 5 ms for the lock several times for
    each token of all other requests.
    """
    sys.setswitchinterval(_LOCK_S)


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http_protocol(),
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        access_log=False,
        server_header=False,
        ws="none",
        backlog=_ACCEPTS_PER_HANDLE,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_S,
    )


def main() -> int:
    """Read the settings and serve; this process ends with the one that started it."""
    _do_without_torch()
    share_interpreter()
    text = sys.stdin.buffer.read()
    if not text:  # rank 0 was stopped before it wrote them
        return 0
    settings = msgspec.json.decode(text, type=FrontendSettings)
    die_with_parent(settings.parent_pid, grace_s=_LAST_ANSWERS_S)
    configure_logging("http", settings.log_format, others=("uvicorn", "asyncio", "opentelemetry"))

    async def serve() -> int:
        with socket.socket(fileno=settings.listener_fd) as listener:
            return await Frontend(settings, ServerConfig(**settings.server), listener).run()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's if it is installed (extra ``fast``), else asyncio's."""
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
