"""Where the engines of tests run: in threads of the test's own process, unless a test is about processes.

The service is the same; a separate process would cost each engine seconds for its imports, and a test could not look
into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import tp_engine.api.llm as llm_module
from tests.fake_engine import FakeEngine, ServiceThread
from tp_engine.api.llm import LLM
from tp_engine.api.output_streams import Outputs
from tp_engine.config import EngineConfig
from tp_engine.engine.service_process import Service, spawn_service
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest

if TYPE_CHECKING:
    from tp_engine.engine.engine import Engine


DEADLINE_S = 100.0


def start_in_thread(config: EngineConfig) -> Service:
    """Stands for ``spawn_service``."""
    from tp_engine.engine.service_thread import start_service_thread  # imports torch, which many tests do without

    return start_service_thread(config)


@contextmanager
def services(start: Callable[[EngineConfig], Service] = spawn_service) -> Iterator[None]:
    """Within, each new ``LLM`` starts its service by ``start``."""
    with patch.object(llm_module, "spawn_service", lambda config, _is_over: start(config)):
        yield


class FakeService(ServiceThread, Service):
    """A ``FakeEngine`` instead of rank 0."""

    def check_pulse(self) -> None:
        """It always lives."""

    def kill(self) -> None:
        self.service.request_stop()

    def close(self) -> None:
        self.join()


class FakeLLM(LLM):
    """An ``LLM`` in which all but the engine is real."""

    engine: FakeEngine  # type: ignore[assignment]

    def __init__(self, engine: FakeEngine, **options: Any) -> None:
        with services(lambda config: FakeService(engine)):
            super().__init__(**{"device": "cpu", **options})
        self.engine = engine


def engine_of(llm: LLM) -> Engine:
    """The engine of an ``LLM`` in a thread of this process; look at it while nothing runs."""
    service: Any = llm._async._service
    engine: Engine = service.started.result()
    return engine


@contextmanager
def stepping(llm: LLM) -> Iterator[Engine]:
    """Give the engine to the calling thread, to step it by hand: its service is stopped within."""
    thread: Any = llm._async._service
    service, held, goes_on = thread._service, threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert goes_on.wait(DEADLINE_S)

    service._turn = hold
    try:
        service._socket.wake()
        assert held.wait(DEADLINE_S)
        yield engine_of(llm)
    finally:
        del service._turn
        goes_on.set()


def run_by_hand(llm: LLM, requests: Sequence[EngineRequest]) -> dict[str, RequestOutput]:
    """The outputs of requests of every kind in one batch, by their ids."""
    outputs = Outputs(llm.get_tokenizer())
    found: dict[str, RequestOutput] = {}
    with stepping(llm) as engine:
        for request in requests:
            engine.add_request(request)
            outputs.add(request)
        while engine.has_unfinished:
            found |= {output.request_id: output for output in outputs.process(engine.step()).finished}
    return found
