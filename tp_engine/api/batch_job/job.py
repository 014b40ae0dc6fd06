"""The second pass of a batch job: lines into the engine of this process, their results out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.api.batch_job.endpoints import PreparedLine
from tp_engine.api.batch_job.lines import BatchRequest
from tp_engine.api.batch_job.outcomes import Outcome, Outcomes
from tp_engine.api.batch_job.prompts import BatchPrompt
from tp_engine.api.batch_job.read_ahead import ReadAhead
from tp_engine.api.batch_job.work import Work
from tp_engine.api.llm import LLM
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.output_processor import Processed
from tp_engine.errors import RequestError
from tp_engine.log import get_logger
from tp_engine.outputs import RequestOutput

logger = get_logger(__name__)

_IDLE_S = 0.1


@dataclass(slots=True)
class _Running:
    """A line with requests in the engine; ``failure`` is what ended one of them before its time, if anything did."""

    ordinal: int
    request: BatchRequest
    prepared: PreparedLine
    num_requests: int = 0
    failure: Exception | None = None


class BatchJob:
    """Keeps about ``max_in_flight`` prompts in the engine, and hands on each line's result when it is complete."""

    def __init__(self, llm: LLM, lines: ReadAhead[Work], outcomes: Outcomes, *, max_in_flight: int) -> None:
        self._llm = llm
        self._lines = lines
        self._outcomes = outcomes
        self._max_in_flight = max_in_flight
        self._requests: dict[str, tuple[_Running, BatchPrompt]] = {}  # request id -> its line, its prompt
        self._next: Work | None = None

    def run(self, stop_requested: Callable[[], bool]) -> bool:
        """Run all lines; False if stopped before the end."""
        while not stop_requested():
            self._admit()
            if self._requests:
                self._step()
            elif self._next is None and self._lines.exhausted:
                return True
        return False

    def _admit(self) -> None:
        """Start lines while there is room; waits for one only if there is nothing else to do."""
        while len(self._requests) < self._max_in_flight:
            work = self._next or self._lines.get(timeout_s=0.0 if self._requests else _IDLE_S)
            self._next = work
            if work is None or not self._outcomes.has_room(work.ordinal):
                return
            self._next = None
            self._start(work)

    def _start(self, work: Work) -> None:
        if work.result is not None:
            self._outcomes.put(work.ordinal, Outcome(work.result))
            return
        assert work.request is not None and work.prepared is not None
        running = _Running(work.ordinal, work.request, work.prepared)
        for prompt in work.prepared.prompts:
            self._submit(running, prompt)
        if running.failure is not None:
            started = [request_id for request_id, (line, _) in self._requests.items() if line is running]
            self._llm.output_processor.process(self._llm.engine.abort(started))
            for request_id in started:
                del self._requests[request_id]
            self._outcomes.put(work.ordinal, Outcome(work.request.failure(running.failure)))

    def _submit(self, running: _Running, prompt: BatchPrompt) -> None:
        """Queue what ``prompt`` needs next, unless something of this line has failed."""
        for engine_request in [] if running.failure else prompt.next_requests():
            try:
                self._llm.engine.add_request(engine_request)
            except RequestError as error:
                running.failure = error
                return
            self._llm.output_processor.add(engine_request)
            self._requests[engine_request.request_id] = (running, prompt)
            running.num_requests += 1

    def _step(self) -> None:
        """One step of the engine; lines that it completes are written."""
        engine, processor = self._llm.engine, self._llm.output_processor
        processed = processor.process(engine.step())
        processor.process(engine.abort(processed.aborts))
        self._outcomes.step(sum(len(update.token_ids) for update in processed.updates))
        self._note_errors(processed)
        for output in processed.finished:
            self._finish_prompt(output)

    def _note_errors(self, processed: Processed) -> None:
        for update in processed.updates:
            if update.error is not None:
                failure = HttpError(500, update.error, code="generation_failed")
                self._requests[update.request_id][0].failure = failure

    def _finish_prompt(self, output: RequestOutput) -> None:
        running, prompt = self._requests.pop(output.request_id)
        running.num_requests -= 1
        if running.failure is None and prompt.take(output):
            self._submit(running, prompt)
        if running.num_requests == 0:
            self._outcomes.put(running.ordinal, self._result(running))

    def _result(self, running: _Running) -> Outcome:
        if running.failure is not None:
            return Outcome(running.request.failure(running.failure))
        outputs = [prompt.output for prompt in running.prepared.prompts if prompt.output is not None]
        try:
            body = running.prepared.answer(outputs)
        except Exception as error:
            logger.exception("the answer to %s can not be written: %s", running.request.line_id, error)
            return Outcome(running.request.failure(error))
        return Outcome(running.request.result(200, body), outputs)
