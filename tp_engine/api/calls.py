"""Calls: requests of a thread that waits for their ends, which the event loop's thread receives.

::

    caller's thread    add(requests)                           take() -> [RequestEnd, ...]
                          |  post                                 ^  SimpleQueue
    loop's thread      Outputs.begin -> engine -> Outputs.process -> put, fail
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tp_engine.api.output_streams import Outputs, Receiver
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest
from tp_engine.system.closing import Closing
from tp_engine.system.off_loop import LoopThread

_AT_ONCE = 512  # requests in a message
_NAP_S = 0.1  # a thread that waits in C does not see exceptions set by other threads


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request: its ``output``, or the ``error`` instead.  ``failure`` is what went wrong with one of
    its sequences while it ran, and ``failure_code`` is set if the request caused it."""

    request_id: str
    output: RequestOutput | None = None
    error: Exception | None = None
    failure: str | None = None
    failure_code: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the request itself is at fault: none of its sequences has a token.  If one fails later, it alone has
        the ``finish_reason`` error."""
        outputs = () if self.output is None else self.output.outputs
        return self.failure_code is not None and not any(one.token_ids for one in outputs)


class Call(Receiver, Closing):
    """Requests that end together with their caller: ``close`` aborts and forgets those that run.

    Whatever exception is raised in the caller's thread, no message is lost or mistaken for that of another call: the
    loop's thread does all the work.  It calls ``on_update`` while requests run.  ``wants_all``: if one is refused, the
    caller has no use for the others.
    """

    is_shared = True

    def __init__(
        self, loop: LoopThread, outputs: Outputs, on_update: Callable[[], object], *, wants_all: bool = False
    ) -> None:
        self._loop, self._outputs, self._on_update, self.wants_all = loop, outputs, on_update, wants_all
        self._ended: queue.SimpleQueue[RequestEnd] = queue.SimpleQueue()
        self._failures: dict[str, tuple[str, str | None]] = {}  # for the loop's thread only
        self.running: dict[str, None] = {}
        """The ids of requests whose ends have not been taken."""

    def add(self, requests: Sequence[EngineRequest], prompts: Sequence[str | None] | None = None) -> None:
        """Send requests; ``prompts`` are the texts of those that came as text."""
        self.running |= dict.fromkeys(request.request_id for request in requests)
        for start in range(0, len(requests), _AT_ONCE):
            part = list(requests[start : start + _AT_ONCE])
            texts = [None] * len(part) if prompts is None else prompts[start : start + _AT_ONCE]
            self._loop.post(self._outputs.begin, part, texts, self)

    def take(self, timeout_s: float | None = None) -> list[RequestEnd]:
        """The ends that have come, at least one unless none comes within ``timeout_s``."""
        ended: list[RequestEnd] = []
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not ended:
            left_s = deadline_s - time.monotonic()
            with contextlib.suppress(queue.Empty):
                ended.append(self._ended.get(timeout=max(0.0, min(_NAP_S, left_s))))
                while True:
                    ended.append(self._ended.get_nowait())
            if left_s <= 0:
                break
        for one in ended:
            self.running.pop(one.request_id, None)
        return ended

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with what they have generated; their ends come as any other."""
        for request_id in list(request_ids):
            self._loop.post(self._outputs.abort, request_id)

    def close(self) -> None:
        """Abort and forget all running requests; safe to call twice."""
        if self.running:
            self._loop.post(self._outputs.leave, list(self.running))
        self.running = {}

    def put(self, update: SequenceUpdate) -> None:
        """Take an update, in the loop's thread."""
        self._on_update()
        if update.error is not None:
            self._failures[update.request_id] = update.error, update.error_code
        if update.request_output is not None:
            failure, code = self._failures.pop(update.request_id, (None, None))
            self._ended.put(RequestEnd(update.request_id, update.request_output, None, failure, code))

    def fail(self, request_id: str, error: Exception) -> None:
        """Take an error, in the loop's thread."""
        self._failures.pop(request_id, None)
        self._ended.put(RequestEnd(request_id, error=error))
