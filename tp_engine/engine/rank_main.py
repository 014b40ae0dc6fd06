"""``python -m tp_engine.engine.rank_main``: a rank that rank 0 started.  Its ``RankSpec`` comes on standard input."""

from __future__ import annotations

import os
import sys

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.engine.job import Job
from tp_engine.engine.processes import die_with_parent, ignore_interrupts
from tp_engine.engine.rank_spec import RankSpec
from tp_engine.faults import configured_faults, fault_injector
from tp_engine.log import configure_logging, get_logger
from tp_engine.progress import RankPhase, RankProgress

logger = get_logger(__name__)

_LAST_WORDS_S = 4.0


def main() -> int:
    """Join, run plans until the stop plan; the exit code is 0 for a stop that was asked for."""
    ignore_interrupts()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    die_with_parent(spec.parent_pid, grace_s=_LAST_WORDS_S)
    config = EngineConfig(**spec.config)  # type: ignore[arg-type]  # checked by EngineConfig itself
    configure_logging(f"rank {spec.rank}", config.log_format)
    try:
        job = Job.attach(spec.board, RankProgress(fault_injector(spec.rank, configured_faults())), config, spec.rank)
        with job.blaming():
            job.progress.reach(RankPhase.IMPORT)
            from tp_engine.engine.rank_group import serve_own_rank  # torch: seconds, which the watchdog already sees

            serve_own_rank(spec, config, job)
    except Exception:
        logger.exception("rank %d failed", spec.rank)
        sys.stderr.flush()
        os._exit(1)  # at once: the interpreter's end would wait for what a library may be stuck in
    return 0


if __name__ == "__main__":
    sys.exit(main())
