"""``python -m tp_engine.engine.rank_main``: a rank that rank 0 started.  Its ``RankSpec`` comes on standard input."""

from __future__ import annotations

import signal
import sys

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.dist import groups as process_groups
from tp_engine.dist.rank import RankInfo
from tp_engine.engine.processes import die_with_parent
from tp_engine.engine.rank_group import RankSpec, check_in_key, join, run_worker
from tp_engine.log import configure_logging, get_logger
from tp_engine.worker.effective_config import resolve

logger = get_logger(__name__)


def main() -> int:
    """Join, run plans until the stop plan; the exit code is 0 for a stop that was asked for."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    die_with_parent(spec.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C reaches every process; rank 0 decides
    configure_logging(f"rank {spec.rank}")
    try:
        effective = resolve(EngineConfig(**spec.config))  # type: ignore[arg-type]  # checked by EngineConfig itself
        config = effective.config
        info = RankInfo(
            rank=spec.rank,
            world_size=config.tensor_parallel_size,
            local_rank=spec.rank,
            local_world_size=config.tensor_parallel_size,
        )
        store = process_groups.join_store(spec.store_host, spec.store_port, timeout_s=config.startup_timeout_s)
        store.set(check_in_key(spec.rank), "1")
        run_worker(effective, join(effective, info, store))
    except Exception:
        logger.exception("rank %d failed", spec.rank)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
