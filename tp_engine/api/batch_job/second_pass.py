"""The second pass over the input: lines into the engine of this process, their results out of it.

::

    Source -> open_lines: read, prepare -> ReadAhead -> LineRunner: add requests, step, finish prompts -> Outcomes
              (in a thread of its own)                  (in the caller's thread)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tp_engine.api.batch_job.endpoints import ENDPOINTS, BatchPrompt
from tp_engine.api.batch_job.lines import BatchRequest, LineError, bad_line, read_line, repeated_line
from tp_engine.api.batch_job.outcomes import Outcomes, Work
from tp_engine.api.batch_job.source import BatchInput
from tp_engine.api.batch_job.survey import LineState, Survey
from tp_engine.api.llm import LLM
from tp_engine.api.openai.errors import sequence_error
from tp_engine.api.openai.requests import PreparedBody
from tp_engine.closing import Closing
from tp_engine.errors import RequestError
from tp_engine.log import get_logger

logger = get_logger(__name__)

_IDLE_S = 0.1
_JOIN_S = 10.0
_OPEN = (LineState.RUN, LineState.BAD, LineState.REPEATED)

PrepareRequest: TypeAlias = Callable[[BatchRequest], PreparedBody]


@dataclass(slots=True)
class _Running:
    """A line with requests in the engine; ``failure`` is the error that ended one of them, if any."""

    work: Work
    request: BatchRequest
    prepared: PreparedBody
    prompts: list[BatchPrompt]
    num_requests: int = 0
    failure: Exception | None = None


class LineRunner:
    """Keeps about ``max_in_flight`` prompts in the engine, of lines that take at most ``max_bytes``, or of one; each
    line's complete result goes to ``outcomes``."""

    def __init__(self, llm: LLM, lines: ReadAhead, outcomes: Outcomes, *, max_in_flight: int, max_bytes: int) -> None:
        self._llm = llm
        self._lines = lines
        self._outcomes = outcomes
        self._max_in_flight, self._max_bytes = max_in_flight, max_bytes
        self._num_bytes = 0  # of the lines that run
        self._requests: dict[str, tuple[_Running, BatchPrompt]] = {}  # request id -> its line, its prompt
        self._next: Work | None = None

    def run(self, stop_requested: Callable[[], bool]) -> bool:
        """Run all lines; False if a stop was requested before the end."""
        while not stop_requested():
            self._admit()
            if self._requests:
                self._step()
            elif self._next is None and self._lines.exhausted:
                return True
        return False

    def _admit(self) -> None:
        """Start lines while there is room; wait for a line only if the engine is idle."""
        while len(self._requests) < self._max_in_flight:
            work = self._next or self._lines.get(timeout_s=0.0 if self._requests else _IDLE_S)
            self._next = work
            has_room = work is None or not self._requests or self._num_bytes + work.num_bytes <= self._max_bytes
            if work is None or not (has_room and self._outcomes.has_room(work.ordinal)):
                return
            self._next = None
            self._start(work)

    def _start(self, work: Work) -> None:
        if work.result is not None:
            self._outcomes.put(work.ordinal, work)
            return
        assert work.request is not None and work.prepared is not None
        decoder, prepared = self._llm.outputs.decoder, work.prepared
        prompts = [BatchPrompt(request, decoder) for request in prepared.requests]
        prompts += [BatchPrompt(search, decoder) for search in prepared.searches]
        running = _Running(work, work.request, prepared, prompts)
        self._num_bytes += work.num_bytes
        for prompt in prompts:
            self._submit(running, prompt)
        if running.failure is not None:
            started = [request_id for request_id, (line, _) in self._requests.items() if line is running]
            self._llm.outputs.process(self._llm.engine.abort(started))
            for request_id in started:
                del self._requests[request_id]
            self._end(running)

    def _end(self, running: _Running) -> None:
        work = running.work
        if running.failure is not None:
            work.result = running.request.failure(running.failure)
        else:
            work.outputs = [prompt.output for prompt in running.prompts if prompt.output is not None]
            try:
                work.result = running.request.result(200, running.prepared.answer(work.outputs))
            except Exception as error:
                logger.exception("the answer to %s can not be written: %s", running.request.line_id, error)
                work.result = running.request.failure(error)
        self._num_bytes -= work.num_bytes
        self._outcomes.put(work.ordinal, work)

    def _submit(self, running: _Running, prompt: BatchPrompt) -> None:
        """Add the next requests of ``prompt`` to the engine, unless a request of this line has failed."""
        for engine_request in [] if running.failure else prompt.next_requests():
            try:
                self._llm.engine.add_request(engine_request)
            except RequestError as error:
                running.failure = running.prepared.named(error)
                return
            self._llm.outputs.add(engine_request)
            self._requests[engine_request.request_id] = (running, prompt)
            running.num_requests += 1

    def _step(self) -> None:
        """Make one step of the engine and write the lines that it completes."""
        processed = self._llm.step()
        self._outcomes.step(processed.num_tokens)
        for update in processed.updates:
            if update.error is not None:
                running, error = self._requests[update.request_id][0], sequence_error(update.error, update.error_code)
                running.failure = running.prepared.named(error) if isinstance(error, RequestError) else error
        for output in processed.finished:
            running, prompt = self._requests.pop(output.request_id)
            running.num_requests -= 1
            if running.failure is None and prompt.take(output):
                self._submit(running, prompt)
            if running.num_requests == 0:
                self._end(running)


def open_lines(source: BatchInput, survey: Survey, prepare: PrepareRequest) -> Iterator[Work]:
    """Open lines in the order of the input; an error of ``prepare`` becomes the line's result."""
    ordinal = 0
    for number, text in source.lines():
        if number > len(survey.states):
            logger.warning(
                "the input has grown since it was checked; lines from %d on are left for the next run", number
            )
            return
        state = survey.states[number - 1]
        if state in _OPEN:
            work = Work(ordinal=ordinal, num_bytes=len(text or b""))
            _fill(work, number, text, survey, prepare)
            yield work
            ordinal += 1


def _fill(work: Work, number: int, text: bytes | None, survey: Survey, prepare: PrepareRequest) -> None:
    try:
        if survey.states[number - 1] == LineState.REPEATED:
            raise repeated_line(number, survey.first_lines[number])
        work.request = read_line(number, text, ENDPOINTS)
    except LineError as error:
        work.result = bad_line(number, text, error)
        return
    try:
        work.prepared = prepare(work.request)
        work.num_bytes += sum(image.num_bytes for one in work.prepared.requests for image in one.images)
    except Exception as error:
        if not isinstance(error, RequestError):
            logger.exception("line %d can not be prepared: %s", number, error)
        work.result = work.request.failure(error)


class ReadAhead(Closing):
    """Reads an iterator in a thread of its own, while fewer than ``max_items`` and ``max_bytes`` are ready.

    ``get`` raises the iterator's exception after the items before it.
    """

    def __init__(self, items: Iterator[Work], *, max_items: int, max_bytes: int) -> None:
        self._items = items
        self._max_items, self._max_bytes = max_items, max_bytes
        self._ready: deque[Work] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._ended = self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
        """Whether ``get`` has given everything."""
        with self._changed:
            return self._ended and not self._ready and self._error is None

    def get(self, timeout_s: float) -> Work | None:
        """Return the next item; None at the end, or if no item is ready within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._ended, timeout_s)
            if self._ready:
                item = self._ready.popleft()
                self._num_bytes -= item.num_bytes
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            return None

    def close(self) -> None:
        """End the thread and drop the items that it has read."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: Work) -> bool:
        """Wait for room and add ``item``; False when closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or (len(self._ready) < self._max_items and self._num_bytes < self._max_bytes)
            )
            self._ready.append(item)
            self._num_bytes += item.num_bytes
            self._changed.notify_all()
            return not self._closing
