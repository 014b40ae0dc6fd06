"""``python -m tp_engine.engine.service_main``: rank 0 as a service.  Its ``ServiceSpec`` comes on standard input."""

from __future__ import annotations

import sys

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.engine.processes import die_with_parent, ignore_interrupts
from tp_engine.engine.rank_group import start_engine
from tp_engine.engine.service import EngineService
from tp_engine.engine.service_process import ServiceSpec
from tp_engine.ipc.pulse import Pulse
from tp_engine.log import configure_logging, get_logger

logger = get_logger(__name__)


def main() -> int:
    """Start the engine, serve until told to stop; the exit code is 0 for a stop that was asked for."""
    ignore_interrupts()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ServiceSpec)
    die_with_parent(spec.parent_pid)
    config = EngineConfig(**spec.config)  # type: ignore[arg-type]  # checked by EngineConfig itself
    configure_logging("rank 0", config.log_format)
    try:
        engine = start_engine(config, ends_process=True, pulse=Pulse.open(spec.pulse))
        try:
            service = EngineService(engine, spec.address)
            try:
                service.run()
            finally:
                service.close()
        finally:
            engine.close()
    except Exception:
        logger.exception("the engine failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
