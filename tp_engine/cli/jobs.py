"""Jobs of all ranks, the same for ``tp-engine``, where rank 0 starts the other ranks, and for torchrun, which runs
``tp_engine.serve`` and ``tp_engine.batch``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tp_engine.api.batch_job.config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.options import Options
from tp_engine.options.launch import run_launched
from tp_engine.server.config import ServerConfig
from tp_engine.server.lifecycle import serve

SERVE_TABLES = {"engine": EngineConfig, "server": ServerConfig}
BATCH_TABLES = {"engine": EngineConfig, "batch": BatchConfig}
_SERVE = "Serve a model over HTTP, as OpenAI's API.  --tensor-parallel-size N starts N ranks."
_BATCH = "Run a file of OpenAI batch requests.  --tensor-parallel-size N starts N ranks."


def serve_job(options: Options) -> int:
    """Serve until told to stop."""
    return serve(options.build("engine", EngineConfig), options.build("server", ServerConfig))


def batch_job(options: Options) -> int:
    """Run the requests that have no result yet."""
    from tp_engine.server.batch import run_launched_batch  # torch, which a server needs only after its frontend

    return run_launched_batch(options.build("engine", EngineConfig), options.build("batch", BatchConfig))


def serve_command(argv: Sequence[str]) -> int:
    """``tp-engine serve``."""
    return run_launched("tp-engine serve", _SERVE, SERVE_TABLES, serve_job, argv)


def batch_command(argv: Sequence[str]) -> int:
    """``tp-engine run-batch``."""
    return run_launched("tp-engine run-batch", _BATCH, BATCH_TABLES, batch_job, argv)
