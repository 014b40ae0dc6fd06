"""``run_batch``: OpenAI request lines in, result lines out, through an engine of this process.

::

    results of earlier runs  ->  survey: check every line  ->  engine  ->  second pass: run, write  ->  summary
                                 (nothing to run: no engine is started)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from os import PathLike, fspath
from typing import Any

from tp_engine import env
from tp_engine.api.batch_job.batch_run import BatchRun
from tp_engine.api.batch_job.config import BatchConfig
from tp_engine.api.batch_job.summary import BatchStatus, BatchSummary
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.engine.rank0_word import ask_rank0
from tp_engine.engine.rank_group import serve_rank
from tp_engine.errors import ConfigError
from tp_engine.options.flags import did_you_mean


def run_batch(
    input_file: str | PathLike[str], output_file: str | PathLike[str], model: str = str(DEMO_MODEL), **options: Any
) -> BatchSummary:
    """Run the lines of ``input_file`` that have no result in ``output_file`` yet; returns what came of them.

    ``options`` are the fields of ``EngineConfig`` (``tensor_parallel_size=2``) and of ``BatchConfig``
    (``output_order="input"``).  A line that can not be served becomes an error among the results.  Raises
    ``ConfigError`` before anything runs, and ``RuntimeError`` when the engine fails; what is written then, or when the
    process is killed, stays, and the next call with the same files goes on.  Under torchrun every rank calls this, and
    on ranks other than 0 it ends the process.
    """
    fields = [{spec.name for spec in dataclasses.fields(kind)} for kind in (EngineConfig, BatchConfig)]
    for name in options:
        if name not in fields[0] | fields[1]:
            raise ConfigError(f"run_batch: unknown option {name}{did_you_mean(name, fields[0] | fields[1])}")
    engine, batch = ({name: value for name, value in options.items() if name in names} for names in fields)
    config = EngineConfig(model=model, **engine)
    return run_job(config, BatchConfig(input_file=fspath(input_file), output_file=fspath(output_file), **batch))


def run_job(
    config: EngineConfig, batch_config: BatchConfig, *, stop_requested: Callable[[], bool] = lambda: False
) -> BatchSummary:
    """As ``run_batch``; the job ends early, and in good order, when ``stop_requested`` says so between two steps."""
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
        if not batch_config.validate_only and ask_rank0():
            serve_rank(config)
        raise SystemExit(0)
