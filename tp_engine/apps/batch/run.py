"""``run_batch``: OpenAI request lines in, result lines out, through an engine that the job starts.

::

    results of earlier runs  ->  survey: check every line  ->  engine  ->  second pass: run, write  ->  summary
                                 (nothing to run: no engine is started)
"""

import dataclasses
import time
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import Unpack

from tp_engine.api.batch_file.endpoints import GrammarTrials, check_request, prepare_request
from tp_engine.api.batch_file.lines import BatchInput, BatchRequest
from tp_engine.api.batch_file.results import EarlierResults, Results
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.llm import LLM
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.requests import PreparedBody, default_model_name
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.apps.batch.keywords import BatchOptions
from tp_engine.apps.batch.second_pass import LineRunner, Outcomes, PrepareRequest, ReadAhead, open_lines
from tp_engine.apps.batch.summary import BatchStatus, BatchSummary
from tp_engine.apps.batch.survey import CheckRequest, Survey, survey_lines
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.engine.build import model_info
from tp_engine.engine.start import (
    ask_rank0,
    check_config,
    check_ranks_stay,
    leave_after_engine,
    let_ranks_go,
    serve_rank,
    tell_ranks,
)
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import ConfigError
from tp_engine.features.lora.options import adapter_names
from tp_engine.options import fields_of
from tp_engine.options.intake import take_options
from tp_engine.system import env
from tp_engine.system.log import get_logger
from tp_engine.system.units import MIB
from tp_engine.worker.effective_config import EffectiveConfig

logger = get_logger(__name__)

_IN_FLIGHT_PER_SEQUENCE = 2
_WINDOW_PER_IN_FLIGHT = 8
_MAX_AHEAD_BYTES = 64 * MIB


def run_batch(
    input_file: str | PathLike[str],
    output_file: str | PathLike[str],
    model: str | PathLike[str] = str(DEMO_MODEL),
    **options: Unpack[BatchOptions],
) -> BatchSummary:
    """Run the lines of ``input_file`` that have no result in ``output_file`` yet; returns a summary.

    ``options`` are the fields of ``EngineConfig`` (``tensor_parallel_size=2``) and of ``BatchConfig``
    (``output_order="input"``).  A line that cannot be served becomes an error among the results.  Raises
    ``ConfigError`` before anything runs, and ``RuntimeError`` if the engine fails.  Written results survive that and a
    kill of the process, and the next call with the same files continues.  Under torchrun every rank calls this; on
    ranks other than 0 it ends the process.
    """
    taken = take_options({"model": model, **options}, [EngineConfig, BatchConfig], where="run_batch")
    config = EngineConfig(**fields_of(EngineConfig, taken))
    batch = fields_of(BatchConfig, taken)
    return run_job(config, BatchConfig(input_file=fspath(input_file), output_file=fspath(output_file), **batch))


def run_job(
    config: EngineConfig, batch_config: BatchConfig, *, stop_requested: Callable[[], bool] = lambda: False
) -> BatchSummary:
    """Run a batch job, as ``run_batch`` does; it stops between two steps when ``stop_requested`` returns True."""
    _serve_if_follower(config, batch_config)
    run = BatchRun(config, batch_config, stop_requested)
    try:
        status = run.run()
    except BaseException as error:
        run.finish(BatchStatus.FAILED if isinstance(error, Exception) else BatchStatus.STOPPED, error)
        raise
    return run.finish(status)


def _serve_if_follower(config: EngineConfig, batch_config: BatchConfig) -> None:
    launched = env.launched_rank()
    if launched is not None and launched.rank > 0:
        leave_after_engine()
        if not batch_config.validate_only and ask_rank0():
            serve_rank(config)
        raise SystemExit(0)
    check_ranks_stay()
    if batch_config.validate_only:
        let_ranks_go()


class BatchRun:
    """One run of a job on rank 0: call ``run`` once, then ``finish``."""

    def __init__(self, config: EngineConfig, batch: BatchConfig, stop_requested: Callable[[], bool]) -> None:
        self._config = config
        self._batch = batch
        self._stop_requested = stop_requested
        self._started_s = time.monotonic()
        self._survey = Survey()
        self._summary = BatchSummary(
            input_file=batch.input_file,
            output_file=batch.output_file,
            error_file=batch.error_file,
            shard=batch.shard,
        )
        self._defaults = batch.defaults(config.model, config.revision)
        names = batch.served_model_name or (default_model_name(config.model), config.model)
        self._model_names = tuple(dict.fromkeys((*names, *adapter_names(config.lora_modules, names))))
        structured = config.structured_outputs_config
        self._grammars = GrammarTrials(structured.compilation_timeout_s)
        self._max_in_flight = batch.max_in_flight or _IN_FLIGHT_PER_SEQUENCE * config.max_num_seqs

    def run(self) -> BatchStatus:
        """Check all lines, then run those without a result; raises ``ConfigError`` before it starts an engine."""
        effective = check_config(self._config)
        output, errors = self._batch.result_paths
        with (
            self._grammars,
            BatchInput(
                self._batch.input_file,
                max_line_bytes=self._batch.max_body_bytes,
                spool_folder=None if output is None else output.parent,
                stop_requested=self._stop_requested,
            ) as source,
        ):
            if not source.is_whole:
                return BatchStatus.STOPPED
            if self._batch.validate_only:
                return self._validate(source, effective)
            with Results(output, errors, resume=self._batch.resume) as results:
                if not self._check(source, results.earlier, self._check_request):
                    return BatchStatus.STOPPED
                results.earlier = EarlierResults()  # no longer needed, and takes memory
                is_needed = self._survey.num_runnable > 0
                tell_ranks(is_needed)
                return self._run_lines(source, results) if is_needed else self._write_errors(source, results)

    def finish(self, status: BatchStatus, error: BaseException | None = None) -> BatchSummary:
        """Write the summary to the log and to ``summary_file``, if there is one."""
        summary = self._summary
        summary.status, summary.elapsed_s = status, time.monotonic() - self._started_s
        if error is not None:
            summary.error = f"{type(error).__name__}: {error}"
        if not isinstance(error, ConfigError):
            logger.info("%s: %s", self._batch.output_file or self._batch.input_file, summary.as_text())
        if self._batch.summary_file is not None:
            summary.write(Path(self._batch.summary_file))
        return summary

    def _validate(self, source: BatchInput, effective: EffectiveConfig) -> BatchStatus:
        """Check all lines with the model's tokenizer and limits, without an engine."""
        config = effective.config
        info = model_info(effective, num_blocks=effective.max_model_len)
        tokenizer = load_tokenizer(config.tokenizer_source, config.revision)
        prepare = self._prepare_with(InputProcessor(info, tokenizer, reads_pixels=False))

        def check(request: BatchRequest) -> None:
            self._check_request(request)
            prepare(request)

        if not self._check(source, EarlierResults(), check):
            return BatchStatus.STOPPED
        self._summary.num_failed, self._summary.errors = self._survey.problems.total(), self._survey.problems
        return BatchStatus.VALIDATED

    def _check_request(self, request: BatchRequest) -> None:
        check_request(request, self._model_names, self._grammars)

    def _check(self, source: BatchInput, earlier: EarlierResults, check: CheckRequest) -> bool:
        """Survey all lines; False if a stop was requested meanwhile."""
        shard, summary = self._batch.input_shard, self._summary
        survey = survey_lines(source, earlier, shard, check, stop_requested=self._stop_requested)
        if survey is None:
            return False
        self._survey = survey
        summary.num_lines, summary.num_succeeded, summary.num_failed = (
            survey.num_lines, survey.num_answered, survey.num_failed,
        )  # fmt: skip
        summary.num_earlier = survey.num_answered + survey.num_failed
        num_bad = survey.problems.total()
        if self._batch.strict and num_bad and not self._batch.validate_only:
            raise ConfigError(f"{num_bad} lines of {self._batch.input_file!r} are bad; with --strict nothing is run")
        if summary.num_earlier:
            logger.info("%d of %d lines have a result", summary.num_earlier, summary.num_lines)
        if survey.num_foreign:
            logger.warning("%d results belong to no line of the input; was it changed?", survey.num_foreign)
        return True

    def _write_errors(self, source: BatchInput, results: Results) -> BatchStatus:
        """Write the results of the remaining lines, none of which can run."""
        with self._outcomes(results) as outcomes:
            for work in open_lines(source, self._survey, self._refuse):
                outcomes.put(work)
        return BatchStatus.COMPLETED

    def _refuse(self, request: BatchRequest) -> PreparedBody:
        self._check_request(request)
        raise RuntimeError("the input was changed while it was read")

    def _run_lines(self, source: BatchInput, results: Results) -> BatchStatus:
        self._grammars.close()
        options = dataclasses.asdict(self._config) | {"generation_config": "vllm"}  # lines have the defaults already
        with LLM(**options) as llm, self._outcomes(results) as outcomes:
            lines = open_lines(source, self._survey, self._prepare_with(llm.input_processor))
            with ReadAhead(lines, max_items=self._max_in_flight, max_bytes=_MAX_AHEAD_BYTES) as ahead:
                most, most_bytes = self._max_in_flight, self._config.mm_transport_bytes
                runner = LineRunner(llm, ahead, outcomes, max_in_flight=most, max_bytes=most_bytes)
                return BatchStatus.COMPLETED if runner.run(self._stop_requested) else BatchStatus.STOPPED

    def _prepare_with(self, processor: InputProcessor) -> PrepareRequest:
        processor.chat = ChatFormat(processor.tokenizer, self._batch)
        return lambda request: prepare_request(request, processor, self._model_names, self._defaults)

    def _outcomes(self, results: Results) -> Outcomes:
        return Outcomes(
            results,
            self._summary,
            keeps_order=self._batch.output_order == "input",
            window=_WINDOW_PER_IN_FLIGHT * self._max_in_flight,
            shows_progress=self._batch.progress_bar,
        )
