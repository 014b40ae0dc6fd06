"""The life of a serving job, from the bound port to the last answer.

::

    rank 0                                     frontend process             ranks 1 to N-1
      bind the port, start the frontend  --->    /live 200, the rest 503      load
      load the engine                            wait for the engine          run plans
      run the service                  <----->   serve
      first signal: serve it out       ----->    503 for new requests         ignore signals
      the frontend has gone            <-----    end, once nothing runs
      stop plan                        ------------------------------------>  end
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tp_engine.api.openai.requests import default_model_name
from tp_engine.config import EngineConfig
from tp_engine.engine.processes import die_with_launcher
from tp_engine.engine.service import EngineService
from tp_engine.engine.service_socket import new_address, remove_address
from tp_engine.features.lora.options import adapter_names
from tp_engine.ipc.pulse import Pulse
from tp_engine.job.progress import hearing_progress
from tp_engine.job.shown_progress import shown_progress
from tp_engine.server.access import warn_of_exposure
from tp_engine.server.config import ServerConfig
from tp_engine.server.frontend_process import FrontendSettings, check_frontend, end_frontend, start_frontend
from tp_engine.server.listener import close_listener, is_listened_on, open_listener, write_port_file
from tp_engine.server.signals import StopRequested, StopSignals, end_process, end_process_after
from tp_engine.server.tracing import check_tracing
from tp_engine.system import env
from tp_engine.system.child_process import kill_children
from tp_engine.system.importing import without_collections
from tp_engine.system.log import get_logger
from tp_engine.system.version import __version__

if TYPE_CHECKING:
    from tp_engine.engine.engine import Engine

logger = get_logger(__name__)

_LEAVE_S = 3.0
_INTERRUPT_S = 20.0
_POLL_S = 0.2
_STOPPED = "stopped"


def serve(config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until told to stop; returns the exit code of this rank's process."""

    def serve_rank0() -> None:
        with without_collections():
            from tp_engine.engine.start import serve_rank  # torch, after the signal handlers

        serve_rank(config)

    if _is_follower():
        return _follow(serve_rank0, server_config.shutdown_timeout_s)
    with _recorded(), StopSignals() as signals:
        with _Leftovers() as leftovers, contextlib.ExitStack() as stack:
            stack.enter_context(_rank0())
            try:
                with signals.raising(leftovers.leave):
                    engine, frontend, address = _start(config, server_config, stack, leftovers)
            except StopRequested:
                pass
            else:
                _run(engine, frontend, address, signals, server_config.shutdown_timeout_s, leftovers)
        logger.info(_STOPPED)
    return 0


def start_engine(config: EngineConfig, *, ends_process: bool, pulse: Pulse) -> Engine:
    """Start the engine.  Its module is imported here and not above: that imports torch, which takes seconds, while the
    frontend process imports its own modules."""
    with without_collections():
        from tp_engine.engine import start

    return start.start_engine(config, ends_process=ends_process, pulse=pulse)


def run_interruptible(job: Callable[[Callable[[], bool]], int]) -> int:
    """Run a job of all ranks and return its exit code; between steps ``job`` calls its argument to see if it must stop.

    On ranks other than 0 ``job`` serves rank 0 and ends the process.
    """
    if _is_follower():
        return _follow(lambda: job(lambda: False), _INTERRUPT_S)
    with _recorded(), StopSignals() as signals, _rank0():
        signals.on_stop(lambda: end_process_after(_INTERRUPT_S, 1), lambda: end_process_after(0.0, 1))
        return job(lambda: signals.received)


def _follow(serve_rank0: Callable[[], object], shutdown_timeout_s: float) -> int:
    """Serve rank 0 on another rank: torchrun signals all ranks at once, and rank 0 alone decides when the job ends."""
    die_with_launcher()
    with StopSignals() as signals:
        signals.on_stop(lambda: _outlive_rank0_briefly(shutdown_timeout_s), lambda: None)
        try:
            with _recorded():
                serve_rank0()
        except Exception:
            if not signals.received:
                end_process_after(_LEAVE_S, 1)
                raise
            return 1
    return 0


class _Leftovers:
    """Removes files that would outlive this process, at the end of ``with`` or by ``leave``.

    An interrupted stop repeats the removals, so each must be safe to call twice, from any thread.
    """

    def __init__(self) -> None:
        self._removals: list[Callable[[], None]] = []

    def __enter__(self) -> _Leftovers:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def add(self, removal: Callable[[], None]) -> None:
        """Call ``removal`` at the end."""
        self._removals.append(removal)

    def leave(self, last_words: str = _STOPPED) -> None:
        """End this process without unwinding: kill its children, remove its files."""
        kill_children()
        self._remove()
        logger.info("%s", last_words)

    def _remove(self) -> None:
        for removal in list(self._removals):
            removal()


def _start(
    config: EngineConfig, server_config: ServerConfig, stack: contextlib.ExitStack, leftovers: _Leftovers
) -> tuple[Engine, subprocess.Popen[bytes], str]:
    """Bind, start the frontend, load; ``stack`` and ``leftovers`` end what was started."""
    model_names = server_config.served_model_name or (default_model_name(config.model),)
    adapter_names(config.lora_modules, model_names)  # errors are reported now
    defaults = server_config.defaults(config.model, config.revision)  # the frontend too, later; errors are reported now
    if "max_tokens" in defaults:
        logger.info("answers end after %d tokens: the generation config has max_new_tokens", defaults["max_tokens"])
    if server_config.otlp_traces_endpoint is not None:
        check_tracing()
    warn_of_exposure(server_config)
    with open_listener(server_config) as listener:
        leftovers.add(lambda: close_listener(server_config))
        if server_config.port_file is not None:
            leftovers.add(write_port_file(server_config.port_file, listener))
        address, pulse = new_address(), Pulse.create()
        leftovers.add(lambda: remove_address(address))
        stack.callback(pulse.stop_sharing)
        settings = FrontendSettings(
            server=dataclasses.asdict(server_config),
            model_names=list(model_names),
            address=address,
            listener_fd=listener.fileno(),
            parent_pid=os.getpid(),
            startup_timeout_s=config.startup_timeout_s,
            pulse_address=pulse.address,
            hard_limit_s=config.watchdog_timeout_s,
            log_format=config.log_format,
            tokenizer=config.tokenizer_source,
        )
        frontend = start_frontend(settings)
        stack.callback(end_frontend, frontend)
    logger.info("tp_engine %s starts, and imports PyTorch first", __version__)
    with _ending_with(frontend, leftovers), shown_progress(), hearing_progress(lambda told: pulse.say(str(told))):
        engine = start_engine(config, ends_process=True, pulse=pulse)
    stack.callback(engine.close)
    return engine, frontend, address


@contextlib.contextmanager
def _ending_with(frontend: subprocess.Popen[bytes], leftovers: _Leftovers) -> Iterator[None]:
    """Within, end this process at once if the HTTP process ends: a model may take minutes to load."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            try:
                check_frontend(frontend)
            except ChildProcessError as error:
                if not is_over.is_set():
                    logger.error("%s while the model loads", error)
                    end_process(1, leftovers.leave)

    threading.Thread(target=watch, name="frontend-watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _run(
    engine: Engine,
    frontend: subprocess.Popen[bytes],
    address: str,
    signals: StopSignals,
    timeout_s: float,
    leftovers: _Leftovers,
) -> None:
    """Serve the frontend until a signal; raises if it dies, or the engine.  ``timeout_s`` is for a drain."""
    check_frontend(frontend)
    service = EngineService(engine, address)

    def drain() -> None:
        if engine.has_unfinished:
            logger.info("stopping; running requests get %g s, a second signal ends them now", timeout_s)
        frontend.send_signal(signal.SIGTERM)  # it refuses new requests, finishes the running ones, and ends
        service.drain(timeout_s)
        end_process_after(timeout_s + _LEAVE_S, 1, lambda: leftovers.leave("stopped by force: the engine did not end"))

    def stop() -> None:
        service.request_stop()
        end_process_after(_LEAVE_S, 0, leftovers.leave)

    def watch() -> None:
        frontend.wait()
        service.request_stop()

    threading.Thread(target=watch, name="frontend-watch", daemon=True).start()
    signals.on_stop(drain, stop)
    try:
        service.run()
    finally:
        service.close()
    if not signals.received:
        check_frontend(frontend)
        raise ChildProcessError("the HTTP process stopped the engine without a stop signal")


def _is_follower() -> bool:
    launched = env.launched_rank()
    return launched is not None and launched.rank > 0


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """Put exceptions into torchrun's summary of the job, with their traceback."""
    try:
        yield
    except Exception as error:
        if env.has_torchrun_agent():
            from tp_engine.distributed.store import record_error  # imports torch.distributed, for more than a second

            record_error(error)
        raise


@contextlib.contextmanager
def _rank0() -> Iterator[None]:
    """Under torchrun: show the other ranks that rank 0 is alive, and end with the agent that started it."""
    if env.launched_rank() is None:
        yield
        return
    die_with_launcher()
    with _announce_rank0():
        yield


def _outlive_rank0_briefly(shutdown_timeout_s: float) -> None:
    """End this process soon after rank 0, or when its time is over.  Called on the signal thread; does not wait.

    On hosts other than rank 0's, the connection to it ends the process; here, only the time does.
    """
    launched = env.launched_rank()
    is_far = launched is not None and launched.rank >= launched.local_world_size

    def watch() -> None:
        deadline_s = time.monotonic() + shutdown_timeout_s + _LEAVE_S
        while (is_far or is_listened_on(_presence_name())) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        end_process_after(_LEAVE_S, 1)

    threading.Thread(target=watch, name="rank-0-watch", daemon=True).start()


def _announce_rank0() -> socket.socket:
    """Show the other ranks of this torchrun job that rank 0 is alive, for as long as the returned socket is open.

    It is an abstract Unix socket: it exists before any process group, leaves no file behind, and the kernel drops it
    however rank 0 ends.
    """
    presence, name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), _presence_name()
    try:
        presence.bind(name)
    except OSError as error:
        presence.close()
        raise RuntimeError(
            f"the abstract Unix socket @{name[1:]} cannot be bound ({error.strerror}): another process of this "
            "network namespace has the name of this job (see /proc/net/unix); start the job again"
        ) from error
    presence.listen()
    return presence


def _presence_name() -> str:
    """The same on all ranks of a host, and unlike any other job's: containers that share a network may have the same
    process ids, and a name that others can foresee may be taken already."""
    launched = env.launched_rank()
    assert launched is not None
    namespace = os.stat("/proc/self/ns/pid").st_ino
    job = (env.RUN_ID.read(), launched.master_addr, launched.master_port, os.getuid(), os.getppid(), namespace)
    return f"\0tp_engine-rank0-{hashlib.sha256(repr(job).encode()).hexdigest()[:32]}"
