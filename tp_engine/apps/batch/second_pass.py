"""The second pass over the input: lines into the engine, their results out of it.

::

    BatchInput -> open_lines: read, prepare -> ReadAhead -> LineRunner: send requests, take ends -> Outcomes
                  (in a separate thread)                    (in the caller's thread)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from tp_engine.api.batch_file.endpoints import ENDPOINTS
from tp_engine.api.batch_file.lines import (
    BatchInput,
    BatchRequest,
    LineError,
    ResultLine,
    bad_line,
    read_line,
    repeated_line,
)
from tp_engine.api.batch_file.results import Results
from tp_engine.api.beam_search import BeamSearch, request_output
from tp_engine.api.llm import LLM
from tp_engine.api.openai.errors import sequence_error
from tp_engine.api.openai.requests import PreparedBody
from tp_engine.apps.batch.summary import BatchSummary
from tp_engine.apps.batch.survey import Survey
from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.errors import EngineDeadError, RequestError, again
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest
from tp_engine.system.closing import Closing
from tp_engine.system.log import get_logger
from tp_engine.system.progress_bar import progress_bar

logger = get_logger(__name__)

_IDLE_S = 0.1
_LOOK_S = 0.01  # for further lines, while there is room for some
_JOIN_S = 10.0
_LOG_PERIOD_S = 30.0
_RATE_PERIOD_S = 2.0

PrepareRequest: TypeAlias = Callable[[BatchRequest], PreparedBody]
Rounds: TypeAlias = Generator[list[EngineRequest], list[RequestOutput], RequestOutput]


@dataclass(slots=True, kw_only=True)
class Work:
    """One open line, the ``ordinal``-th of the job: a ``request``, prepared, or already its ``result``.

    ``num_bytes`` is the length of the line, and what the pixels of its images take.  While it runs, ``outputs`` are
    those of its prompts, as far as they have ended, and ``failure`` is the error that ended a request, if any.
    """

    ordinal: int
    num_bytes: int
    request: BatchRequest | None = None
    prepared: PreparedBody | None = None
    result: ResultLine | None = None
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    num_running: int = 0
    failure: Exception | None = None


@dataclass(slots=True)
class _LinePrompt:
    """The ``number``-th prompt of a line.  ``outputs`` are those of the requests of its round, in their order."""

    work: Work
    number: int
    rounds: Rounds
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


class LineRunner:
    """Keeps about ``max_in_flight`` prompts in the engine, of lines that take at most ``max_bytes``, or of one; each
    line's complete result goes to ``outcomes``."""

    def __init__(self, llm: LLM, lines: ReadAhead, outcomes: Outcomes, *, max_in_flight: int, max_bytes: int) -> None:
        self._decoder, self._call = llm.outputs.decoder, llm.new_call()
        self._lines = lines
        self._outcomes = outcomes
        self._max_in_flight, self._max_bytes = max_in_flight, max_bytes
        self._num_bytes = 0  # of the lines that run
        self._prompts: dict[str, _LinePrompt] = {}  # by the ids of the requests in the engine
        self._next: Work | None = None

    def run(self, stop_requested: Callable[[], bool]) -> bool:
        """Run all lines; False if a stop was requested before the end."""
        with self._call:
            while not stop_requested():
                self._admit()
                if self._prompts:
                    self._take()
                elif self._next is None and self._lines.exhausted:
                    return True
        return False

    def _admit(self) -> None:
        """Start lines while there is room; wait for a line only if the engine is idle."""
        while len(self._prompts) < self._max_in_flight:
            work = self._next or self._lines.get(timeout_s=0.0 if self._prompts else _IDLE_S)
            self._next = work
            has_room = work is None or not self._prompts or self._num_bytes + work.num_bytes <= self._max_bytes
            if work is None or not (has_room and self._outcomes.has_room(work.ordinal)):
                return
            self._next = None
            if work.result is None:
                self._start(work)
            else:
                self._outcomes.put(work)

    def _start(self, work: Work) -> None:
        assert work.prepared is not None
        self._num_bytes += work.num_bytes
        prompts: list[EngineRequest | BeamSearch] = [*work.prepared.requests, *work.prepared.searches]
        for number, prompt in enumerate(prompts):
            self._submit(_LinePrompt(work, number, _rounds(prompt, self._decoder)))

    def _submit(self, prompt: _LinePrompt) -> None:
        """Add the next requests of ``prompt`` to the engine, unless it or its line has ended."""
        work = prompt.work
        if work.failure is not None:
            return
        try:
            outputs = [output for output in prompt.outputs.values() if output is not None]
            requests = prompt.rounds.send(outputs) if outputs else next(prompt.rounds)
        except StopIteration as end:
            work.outputs[prompt.number] = end.value
            return
        prompt.outputs = dict.fromkeys(request.request_id for request in requests)
        self._call.add(requests)
        self._prompts |= dict.fromkeys(prompt.outputs, prompt)
        work.num_running += len(requests)

    def _take(self) -> None:
        """Wait briefly for ended requests, and write the lines that they complete."""
        num_tokens = 0
        for ended in self._call.take(_IDLE_S if len(self._prompts) >= self._max_in_flight else _LOOK_S):
            prompt = self._prompts.pop(ended.request_id)
            work, output = prompt.work, ended.output
            work.num_running -= 1
            if isinstance(ended.error, EngineDeadError):
                raise again(ended.error.__cause__ or ended.error)
            if ended.error is not None:
                self._fail(work, ended.error)
            elif ended.failure is not None:
                self._fail(work, sequence_error(ended.failure, ended.failure_code))
            elif output is not None:
                num_tokens += sum(len(one.token_ids) for one in output.outputs)
                prompt.outputs[ended.request_id] = output
                if None not in prompt.outputs.values():
                    self._submit(prompt)
            if work.num_running == 0:
                self._end(work)
        self._outcomes.step(num_tokens)

    def _fail(self, work: Work, error: Exception) -> None:
        assert work.prepared is not None
        if work.failure is None:
            work.failure = work.prepared.named(error) if isinstance(error, RequestError) else error
            self._call.abort([request_id for request_id, prompt in self._prompts.items() if prompt.work is work])

    def _end(self, work: Work) -> None:
        assert work.request is not None and work.prepared is not None
        if work.failure is None:
            try:
                outputs = [output for _, output in sorted(work.outputs.items())]
                work.result = work.request.result(200, work.prepared.answer(outputs))
            except Exception as error:
                logger.exception("the answer to %s cannot be written: %s", work.request.line_id, error)
                work.failure = error
        if work.failure is not None:
            work.result = work.request.failure(work.failure)
        self._num_bytes -= work.num_bytes
        self._outcomes.put(work)


def _rounds(prompt: EngineRequest | BeamSearch, decoder: TokenDecoder | None) -> Rounds:
    """Yield the requests of each round of a prompt, which gets their outputs; return the prompt's output.

    A request is a prompt's only one; a search has several in each round, and its output the ``n`` best sequences.
    """
    if isinstance(prompt, EngineRequest):
        (output,) = yield [prompt]
        return output
    while not prompt.done:
        prompt.advance((yield prompt.next_requests()))
    return request_output(prompt, decoder)


class Outcomes(Closing):
    """Writes results, counts them in ``summary``, and shows the progress: a bar on a terminal, else lines in the log.

    Lines are written as they end, or, with ``keeps_order``, in their order: then results are held back, and
    ``has_room`` lets a line start only if it is less than ``window`` ahead of the first one that is missing.
    """

    def __init__(
        self, results: Results, summary: BatchSummary, *, keeps_order: bool, window: int, shows_progress: bool
    ) -> None:
        self._results = results
        self._summary = summary
        self._keeps_order, self._window = keeps_order, window
        self._held: dict[int, Work] = {}
        self._next = 0
        self._started_s = self._rated_s = time.monotonic()
        self._num_tokens = 0
        self._bar = progress_bar(
            "lines",
            total=summary.num_lines,
            initial=summary.num_earlier,
            unit="line",
            say=lambda text: logger.info("%s", text),
            period_s=_LOG_PERIOD_S,
            disable=not shows_progress,
        )

    def has_room(self, ordinal: int) -> bool:
        """Whether the line with this number may start."""
        return not self._keeps_order or ordinal - self._next < self._window

    def put(self, work: Work) -> None:
        """Take a line with its result."""
        if not self._keeps_order:
            self._write(work)
            return
        self._held[work.ordinal] = work
        while self._next in self._held:
            self._write(self._held.pop(self._next))
            self._next += 1

    def step(self, num_tokens: int) -> None:
        """Count a step of the engine, which generated ``num_tokens``."""
        self._results.sync_if_due()
        self._num_tokens += num_tokens
        seconds = time.monotonic() - self._rated_s
        if seconds >= _RATE_PERIOD_S:
            self._bar.set_postfix_str(f"{self._num_tokens / seconds:,.0f} tokens/s", refresh=False)
            self._num_tokens, self._rated_s = 0, self._rated_s + seconds

    def close(self) -> None:
        """Stop the bar, and note how long lines ran."""
        self._bar.close()
        self._summary.running_s = time.monotonic() - self._started_s

    def _write(self, work: Work) -> None:
        assert work.result is not None
        self._results.write(work.result)
        if work.result.error is None:
            self._summary.count_answer(list(work.outputs.values()))
        else:
            self._summary.count_error(work.result.error["code"] or "invalid_request")
        self._bar.update(1)


def open_lines(source: BatchInput, survey: Survey, prepare: PrepareRequest) -> Iterator[Work]:
    """Open lines in the order of the input; an error of ``prepare`` becomes the line's result."""
    ordinal = 0
    for number, text in source.lines():
        if number > len(survey.is_open):
            logger.warning(
                "the input has grown since it was checked; lines from %d on are left for the next run", number
            )
            return
        if survey.is_open[number - 1]:
            work = Work(ordinal=ordinal, num_bytes=len(text or b""))
            try:
                if number in survey.first_lines:
                    raise repeated_line(number, survey.first_lines[number])
                work.request = read_line(number, text, ENDPOINTS)
                work.prepared = prepare(work.request)
                work.num_bytes += sum(image.num_bytes for one in work.prepared.requests for image in one.images)
            except LineError as error:
                work.result = bad_line(number, text, error)
            except Exception as error:
                if not isinstance(error, RequestError):
                    logger.exception("line %d cannot be prepared: %s", number, error)
                assert work.request is not None
                work.result = work.request.failure(error)
            yield work
            ordinal += 1


class ReadAhead(Closing):
    """Reads an iterator in a separate thread, while fewer than ``max_items`` and ``max_bytes`` are ready.

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
        """The next item; None at the end, or if no item is ready within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._ended, timeout_s)
            if self._ready:
                item = self._ready.popleft()
                self._num_bytes -= item.num_bytes
                self._changed.notify_all()
                return item
            if self._error is not None:
                error, self._error = self._error, None
                raise error
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
                with self._changed:
                    self._changed.wait_for(self._has_room)
                    if self._closing:
                        return
                    self._ready.append(item)
                    self._num_bytes += item.num_bytes
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._closing or (len(self._ready) < self._max_items and self._num_bytes < self._max_bytes)
