"""The life of a launched batch job: signals, standard output, and what its outcome means as an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from tp_engine import env
from tp_engine.api.batch_job.config import STANDARD_STREAM, BatchConfig
from tp_engine.api.batch_job.run import run_job
from tp_engine.api.batch_job.summary import BatchStatus, BatchSummary
from tp_engine.config import EngineConfig
from tp_engine.server.lifecycle import run_interruptible

EXIT_ALL_GOOD = 0
EXIT_NOT_DONE = 1
EXIT_LINES_FAILED = 3


def run_launched_batch(config: EngineConfig, batch_config: BatchConfig) -> int:
    """Run the requests that have no result yet; returns the exit code of this rank's process.

    0: every line was answered.  3, or ``errors_exit_code``: all lines are done, some with an error.  1: stopped before
    the end.  What is raised means 1 or 2, as for every launched process.
    """
    with _clean_standard_output(batch_config.output_file == STANDARD_STREAM):
        return run_interruptible(
            lambda stop_requested: exit_code(
                run_job(config, batch_config, stop_requested=stop_requested), batch_config.errors_exit_code
            )
        )


def exit_code(summary: BatchSummary, errors_exit_code: int | None = None) -> int:
    """What ``summary`` means.  torchrun knows only success and failure: lines with an error are no failed job to it."""
    if summary.status not in (BatchStatus.COMPLETED, BatchStatus.VALIDATED):
        return EXIT_NOT_DONE
    if summary.num_failed == 0:
        return EXIT_ALL_GOOD
    if errors_exit_code is not None:
        return errors_exit_code
    return EXIT_LINES_FAILED if env.launched_rank() is None else EXIT_ALL_GOOD


@contextlib.contextmanager
def _clean_standard_output(is_wanted: bool) -> Iterator[None]:
    """Results alone go to standard output; what libraries print there goes to standard error instead."""
    if not is_wanted:
        yield
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as results, contextlib.redirect_stdout(results):
        os.dup2(2, 1)
        yield
