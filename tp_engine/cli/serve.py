"""``tp-engine serve``: one job on all ranks, started by the command itself or by torchrun."""

from collections.abc import Sequence

from tp_engine.config import EngineConfig
from tp_engine.options import Options
from tp_engine.options.launch import run_launched
from tp_engine.server.config import SERVE_TABLES, ServerConfig
from tp_engine.server.lifecycle import serve

_DESCRIPTION = "Serve a model over HTTP, as OpenAI's API.  --tensor-parallel-size N starts N ranks."


def main(argv: Sequence[str] | None = None, *, prog: str = "tp-engine serve") -> int:
    """Run this process's part of the job with the options of its command line; returns its exit code."""
    return run_launched(prog, _DESCRIPTION, SERVE_TABLES, serve_job, argv)


def serve_job(options: Options) -> int:
    """Serve until told to stop."""
    return serve(options.build("engine", EngineConfig), options.build("server", ServerConfig))
