"""An engine that runs its steps on request, so that a test can act between two steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from tp_engine.requests.request import EngineRequest, SequenceDelta, StepOutput

HELD_S = 0.005


class GatedEngine:
    """``engine`` behind a gate: ``allow(n)`` lets ``n`` steps run, ``open`` all; ``num_steps`` counts steps.

    Requests and aborts reach the engine also while steps are held up: then a call returns nothing after a moment.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.num_steps = 0
        self.added: list[str] = []
        self.aborted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def allow(self, num_steps: int) -> None:
        """Let ``num_steps`` more steps run."""
        for _ in range(num_steps):
            self._permits.release()

    def open(self) -> None:
        """Let every step run from now on."""
        self._is_open = True
        self._permits.release()

    def close_gate(self) -> None:
        """Hold up the next step."""
        self._is_open = False
        while self._permits.acquire(blocking=False):
            pass

    def add_request(self, request: EngineRequest) -> None:
        self._engine.add_request(request)
        self.added.append(request.request_id)

    def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
        deltas: list[SequenceDelta] = self._engine.abort(request_ids)
        self.aborted += sorted({delta.request_id for delta in deltas})
        return deltas

    def step(self) -> StepOutput:
        if not self._is_open and not self._permits.acquire(timeout=HELD_S):
            return StepOutput()
        output: StepOutput = self._engine.step()
        self.num_steps += 1
        return output
