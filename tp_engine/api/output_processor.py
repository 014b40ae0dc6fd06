"""From the engine's deltas to text: updates for streams, and a ``RequestOutput`` when a request has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tp_engine.api.request_state import RequestState, SequenceUpdate
from tp_engine.engine.detokenizer import TokenDecoder
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest, SequenceDelta


@dataclass(slots=True)
class Processed:
    """What some deltas came to.  ``aborts`` are requests that ended here but still run in the engine: abort them."""

    updates: list[SequenceUpdate] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


class OutputProcessor:
    """Keeps the state of every request between ``add`` and its end; ``tokenizer`` None gives empty texts.

    A sequence that a stop string ended is still running in the engine: its further deltas are ignored, and once all
    sequences of its request have ended the request is among ``Processed.aborts``.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self.decoder = None if tokenizer is None else TokenDecoder(tokenizer)
        self._states: dict[str, RequestState] = {}
        self._lock = threading.Lock()  # a request as it stands may be asked for while a step is processed elsewhere

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request: EngineRequest, prompt: str | None = None) -> None:
        """Expect deltas of ``request``; ``prompt`` is its text, where it came as text."""
        assert request.request_id not in self._states, request.request_id
        self._states[request.request_id] = RequestState(request, prompt, self.decoder)

    def forget(self, request_id: str) -> None:
        """Ignore the request from now on; nothing happens for an unknown one."""
        self._states.pop(request_id, None)

    def so_far(self, request_id: str) -> RequestOutput | None:
        """A copy of what the request has generated until now; None once it has ended."""
        state = self._states.get(request_id)
        with self._lock:
            return None if state is None else state.output(time.monotonic())

    def process(self, deltas: Iterable[SequenceDelta]) -> Processed:
        """Take deltas in the engine's order; those of unknown and ended requests are ignored."""
        processed, now_s = Processed(), time.monotonic()
        for delta in deltas:
            state = self._states.get(delta.request_id)
            if state is None:
                continue
            with self._lock:
                update = state.apply(delta, now_s)
            if update is None:
                continue
            processed.updates.append(update)
            if state.finished:
                self._states.pop(delta.request_id, None)
                update.request_output = state.output(now_s)
                processed.finished.append(update.request_output)
                if state.runs_in_engine:
                    processed.aborts.append(delta.request_id)
        return processed
