"""``tp-engine run-batch``: one job on all ranks, started by the command itself or by torchrun."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from tp_engine.api.batch_file.lines import STANDARD_STREAM
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.apps.batch.summary import BatchStatus, BatchSummary
from tp_engine.config import EngineConfig
from tp_engine.options import Options
from tp_engine.options.launch import run_launched
from tp_engine.server.lifecycle import run_interruptible
from tp_engine.system import env

TABLES = {"engine": EngineConfig, "batch": BatchConfig}
_DESCRIPTION = "Run a file of OpenAI batch requests.  --tensor-parallel-size N starts N ranks."

EXIT_ALL_GOOD = 0
EXIT_NOT_DONE = 1
EXIT_LINES_FAILED = 3


def main(argv: Sequence[str] | None = None, *, prog: str = "tp-engine run-batch") -> int:
    """Run this process's part of the job with the options of its command line; returns its exit code."""
    return run_launched(prog, _DESCRIPTION, TABLES, batch_job, argv)


def batch_job(options: Options) -> int:
    """Run the requests that have no result yet."""
    return run_launched_batch(options.build("engine", EngineConfig), options.build("batch", BatchConfig))


def run_launched_batch(config: EngineConfig, batch_config: BatchConfig) -> int:
    """Run the requests that have no result yet; returns the exit code of this rank's process.

    0: every line was answered.  3, or ``errors_exit_code``: all lines are done, some with an error.  1: stopped before
    the end.  ``run_launched`` turns exceptions into 1 or 2.
    """
    from tp_engine.apps.batch.run import run_job  # imports torch, which a server needs only after its frontend

    with _clean_standard_output(batch_config.output_file == STANDARD_STREAM):
        return run_interruptible(
            lambda stop_requested: exit_code(
                run_job(config, batch_config, stop_requested=stop_requested), batch_config.errors_exit_code
            )
        )


def exit_code(summary: BatchSummary, errors_exit_code: int | None = None) -> int:
    """The code for ``summary``; 0 for lines with errors under torchrun, which takes other codes for a failed
    job."""
    if summary.status not in (BatchStatus.COMPLETED, BatchStatus.VALIDATED):
        return EXIT_NOT_DONE
    if summary.num_failed == 0:
        return EXIT_ALL_GOOD
    if errors_exit_code is not None:
        return errors_exit_code
    return EXIT_LINES_FAILED if env.launched_rank() is None else EXIT_ALL_GOOD


@contextlib.contextmanager
def _clean_standard_output(is_wanted: bool) -> Iterator[None]:
    """Reserve standard output for results: what libraries print there goes to standard error."""
    if not is_wanted:
        yield
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as results, contextlib.redirect_stdout(results):
        os.dup2(2, 1)
        yield
