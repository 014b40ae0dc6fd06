"""Rank 0 as a service in a thread of this process, where torchrun has started the ranks: this one is among them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

from tp_engine.config import EngineConfig
from tp_engine.engine.engine import Engine
from tp_engine.engine.service import EngineService
from tp_engine.engine.service_process import Service
from tp_engine.engine.service_socket import new_address, remove_address
from tp_engine.engine.start import start_engine
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_STOP_TIMEOUT_S = 15.0


class ServiceThread(Service):
    """A running service.  In a thread of its own, an engine meets none of what the program's threads have set for
    themselves (a device, autocast, gradients), and no exception that is meant for them."""

    def __init__(self, config: EngineConfig) -> None:
        self.address = new_address()
        self._config = config
        self._service: EngineService | None = None
        self._thread = threading.Thread(target=self._run, name="rank 0", daemon=True)
        self.started: Future[Engine] = Future()

    def check_pulse(self) -> None:
        """The watchdog of this very process looks after rank 0."""

    def kill(self) -> None:
        """Abort everything and stop."""
        if self._service is not None:
            self._service.request_stop()

    def close(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(_STOP_TIMEOUT_S)
        remove_address(self.address)

    def start(self) -> None:
        """Start the engine; returns when it is ready for its client, and raises what the start raised."""
        self._thread.start()
        try:
            self.started.result()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                engine = start_engine(self._config)
                stack.callback(engine.close)
                service = self._service = EngineService(engine, self.address)
                stack.callback(service.close)
                self.started.set_result(engine)
                service.run()
        except BaseException as error:
            if self.started.done():
                logger.error("the engine failed: %s", error)  # its client has been told more
            else:
                self.started.set_exception(error)


def start_service_thread(config: EngineConfig) -> ServiceThread:
    """Return a running service; raises what the start of the engine raised."""
    service = ServiceThread(config)
    service.start()
    return service
