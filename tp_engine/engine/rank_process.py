"""The process of a rank that rank 0 starts; ``main`` reads its ``RankSpec`` from standard input.

Where torchrun starts the ranks, ``start.serve_rank`` does the same without this process.
"""

import os
import sys

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.engine.job import Job
from tp_engine.engine.processes import die_with_parent
from tp_engine.errors import RankError
from tp_engine.ipc.job_board import JobBoard
from tp_engine.job.faults import fault_injector
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.system.child_process import ignore_stop_signals
from tp_engine.system.importing import without_collections
from tp_engine.system.log import configure_logging, get_logger

logger = get_logger(__name__)

_LAST_WORDS_S = 4.0


class RankSpec(msgspec.Struct, kw_only=True):
    """What rank 0 tells a rank that it starts, as JSON; ``board`` is the address of the job's board."""

    config: EngineConfig
    rank: int
    store_host: str
    store_port: int
    parent_pid: int
    board: str


def main() -> int:
    """Join the job and run its plans; the exit code is 0 after the stop plan."""
    ignore_stop_signals()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    die_with_parent(spec.parent_pid, grace_s=_LAST_WORDS_S)
    config = spec.config
    configure_logging(f"rank {spec.rank}", config.log_format, is_first=False)
    try:
        board, progress = JobBoard.open(spec.board), RankProgress(fault_injector(spec.rank))
        job = Job(board, progress, config, spec.rank, ends_process=True, same_parent=False)
        with job.blaming():
            job.progress.reach(RankPhase.IMPORT)
            # torch takes seconds to import, and the job's watchdog must see the rank before that
            with without_collections():
                from tp_engine.engine.rank_worker import serve_own_rank

            serve_own_rank(spec.rank, (spec.store_host, spec.store_port), config, job)
    except Exception as error:
        _log(spec.rank, error)
        sys.stderr.flush()
        os._exit(1)  # at once: the interpreter's normal end could wait for a thread that hangs in a library
    return 0


def _log(rank: int, error: Exception) -> None:
    """Tell why ``rank`` ends.  The fault of another rank has no traceback here: where this one noticed says nothing."""
    if isinstance(error, RankError) and error.rank != rank:
        logger.error("rank %d ends: %s", rank, error)
    else:
        logger.error("rank %d failed", rank, exc_info=error)
