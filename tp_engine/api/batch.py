"""The batch job: OpenAI request lines in, result lines out, through the engine of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from tp_engine.api.batch_config import BatchConfig
from tp_engine.api.batch_files import ResultFile, read_requests
from tp_engine.api.batch_lines import BatchRequest, LineError, ResultLine, bad_line, line_id, read_line
from tp_engine.api.batch_prompts import BatchPrompt, PlainPrompt, SearchedPrompt
from tp_engine.api.generation_defaults import load_generation_defaults
from tp_engine.api.llm import LLM
from tp_engine.api.openai_requests import default_model_name, prepare, prepare_searches
from tp_engine.api.openai_responses import AnswerShape
from tp_engine.config import EngineConfig
from tp_engine.errors import RequestError
from tp_engine.log import get_logger
from tp_engine.request import EngineRequest

logger = get_logger(__name__)

_IN_FLIGHT_PER_SEQUENCE = 2


def run_batch(
    config: EngineConfig, batch_config: BatchConfig, *, stop_requested: Callable[[], bool] = lambda: False
) -> bool:
    """Run every request that has no result yet; False if ``stop_requested`` ended the job before the last.

    Under torchrun all ranks call this; those other than 0 serve rank 0 and end their process.
    """
    with LLM(**dataclasses.asdict(config)) as llm, closing(ResultFile(Path(batch_config.output_file))) as results:
        job = BatchJob(llm, results, max_in_flight=_IN_FLIGHT_PER_SEQUENCE * config.max_num_seqs)
        complete = job.run(read_requests(Path(batch_config.input_file)), stop_requested)
        logger.info("%s: %s", batch_config.output_file, job.summary(complete))
    return complete


@dataclasses.dataclass(slots=True)
class _Running:
    """A line whose prompts run."""

    request: BatchRequest
    shape: AnswerShape
    echoes: list[str] | None
    prompts: list[BatchPrompt]


class BatchJob:
    """Keeps about ``max_in_flight`` requests in the engine, and writes each line's result when it is complete."""

    def __init__(self, llm: LLM, results: ResultFile, *, max_in_flight: int) -> None:
        self._llm = llm
        self._results = results
        self._max_in_flight = max_in_flight
        model = llm.engine.model_info
        self._model_name = default_model_name(model.model)
        self._defaults = load_generation_defaults(model.model, model.revision)
        self._requests: dict[str, tuple[_Running, BatchPrompt]] = {}  # request id -> its line, its prompt
        self._seen: set[str] = set()
        self.num_done = 0
        self.num_failed = 0
        self.num_skipped = 0

    def run(self, lines: Iterable[tuple[int, bytes]], stop_requested: Callable[[], bool]) -> bool:
        """Run ``lines``, pairs of line number and text; False if stopped before the end."""
        with tqdm(desc="lines", unit="") as progress:
            for number, text in lines:
                while len(self._requests) >= self._max_in_flight and not stop_requested():
                    self._step(progress)
                if stop_requested():
                    return False
                self._admit(number, text, progress)
            while self._requests and not stop_requested():
                self._step(progress)
        return not self._requests

    def summary(self, complete: bool) -> str:
        """One line for the log."""
        counts = f"{self.num_done} done, {self.num_failed} failed, {self.num_skipped} had a result already"
        return counts if complete else f"interrupted with {counts}; run the same command to go on"

    def _admit(self, number: int, text: bytes, progress: tqdm) -> None:
        """Start a line, or write at once why it can not be started."""
        finished = self._results.finished
        try:
            request = read_line(number, text)
            if request.custom_id in self._seen:
                raise LineError(f"line {number} repeats the custom_id of an earlier line", "duplicate_custom_id")
        except LineError as error:
            if line_id(number) in finished.line_ids:
                self.num_skipped += 1
            else:
                self._write(bad_line(number, text, error), progress)
            return
        self._seen.add(request.custom_id)
        if request.custom_id in finished.custom_ids:
            self.num_skipped += 1
        else:
            self._start(request, progress)

    def _start(self, request: BatchRequest, progress: tqdm) -> None:
        started: list[str] = []
        try:
            running = self._prepare(request)
            for prompt in running.prompts:
                for engine_request in prompt.next_requests():
                    self._submit(engine_request, running, prompt)
                    started.append(engine_request.request_id)
        except RequestError as error:
            self._llm.output_processor.process(self._llm.engine.abort(started))
            for request_id in started:
                del self._requests[request_id]
            self._write(request.failure(error), progress)

    def _prepare(self, request: BatchRequest) -> _Running:
        body, processor = request.parse(), self._llm.input_processor
        model_name = body.model or self._model_name
        if body.use_beam_search:
            searched = prepare_searches(body, processor, self._llm.engine.model_info, model_name)
            decoder, n = self._llm.output_processor.decoder, body.n or 1
            searches: list[BatchPrompt] = [SearchedPrompt(search, decoder, n) for search in searched.searches]
            return _Running(request, searched.shape, searched.echoes, searches)
        prepared = prepare(body, processor, model_name, self._defaults)
        return _Running(request, prepared.shape, prepared.echoes, [PlainPrompt(one) for one in prepared.requests])

    def _submit(self, engine_request: EngineRequest, running: _Running, prompt: BatchPrompt) -> None:
        self._llm.engine.add_request(engine_request)
        self._llm.output_processor.add(engine_request)
        self._requests[engine_request.request_id] = (running, prompt)

    def _step(self, progress: tqdm) -> None:
        """One step of the engine; lines that it completes are written."""
        engine, processor = self._llm.engine, self._llm.output_processor
        processed = processor.process(engine.step())
        processor.process(engine.abort(processed.aborts))
        for output in processed.finished:
            running, prompt = self._requests.pop(output.request_id)
            if prompt.take(output):
                for engine_request in prompt.next_requests():
                    self._submit(engine_request, running, prompt)
            outputs = [one.output for one in running.prompts if one.output is not None]
            if len(outputs) == len(running.prompts):
                body = running.shape.answer(outputs, running.echoes)
                self._write(running.request.result(200, body), progress)

    def _write(self, line: ResultLine, progress: tqdm) -> None:
        self._results.write(line)
        self.num_done += line.error is None
        self.num_failed += line.error is not None
        progress.update(1)
