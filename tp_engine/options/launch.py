"""Runs a launched process: reads the options, runs the job, reports a failure once, and returns the exit code."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tp_engine.errors import (
    ConfigError,
    EngineDeadError,
    MemoryBudgetError,
    PlanError,
    RankError,
    RequestError,
    WeightError,
)
from tp_engine.options import Options, adopt_world_size, parse_options
from tp_engine.system import env
from tp_engine.system.log import configure_logging, get_logger

EXIT_DONE = 0
EXIT_MACHINE = 1
EXIT_CONFIG = 2
_RANK0_REPORTS_S = 10.0  # on a busy machine; whoever waits is ended with rank 0

_EXPLAINED = (RankError, WeightError, PlanError, EngineDeadError, OSError)

logger = get_logger(__name__)


def run_launched(
    prog: str,
    description: str,
    tables: Mapping[str, type[Any]],
    job: Callable[[Options], int],
    argv: Sequence[str] | None = None,
) -> int:
    """Run ``job`` with the options and return the exit code of this process.

    0: done, or stopped on request.  2: the configuration cannot work; rank 0 reports it.  1: any other failure; known
    kinds are logged in one line, others with their traceback.
    """
    rank = env.given_rank()
    try:
        launched = env.launched_rank()
        rank, is_first = (launched.rank, launched.local_rank == 0) if launched else (0, True)
        configure_logging(f"rank {rank}", is_first=is_first)
        with _silent_unless(rank == 0):
            options = parse_options(prog, description, tables, argv)
        configure_logging(f"rank {rank}", options.given["engine"].get("log_format", "text"), is_first=is_first)
        for note in options.notes if rank == 0 else ():
            logger.info("%s", note)
        adopt_world_size(options.given["engine"], launched.world_size if launched else None)
        if not options.print_config:
            return job(options)
        for table, kind in options.tables.items():
            options.build(table, kind)
        if rank == 0:
            print(options.effective_toml(), end="", flush=True)
        return EXIT_DONE
    except (ConfigError, RequestError) as error:
        _report_once(f"{prog}: error: {error}", rank)
        return EXIT_CONFIG
    except MemoryBudgetError as error:  # all ranks raise the same error
        _report_once(f"{prog}: error: {error}", rank)
        return EXIT_MACHINE
    except _EXPLAINED as error:
        logger.error("%s", error)
        return EXIT_MACHINE
    except Exception as error:
        logger.exception("%s: %s", type(error).__name__, error)
        return EXIT_MACHINE


def _report_once(message: str, rank: int) -> None:
    """Rank 0 prints; the other ranks wait, because torchrun ends all ranks as soon as one has ended."""
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(_RANK0_REPORTS_S)


@contextlib.contextmanager
def _silent_unless(prints: bool) -> Any:
    """``--help`` is printed once per job, not once per rank."""
    with contextlib.nullcontext() if prints else contextlib.redirect_stdout(io.StringIO()):
        yield
