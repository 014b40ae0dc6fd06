"""Serve a model over HTTP: ``torchrun --nproc-per-node 8 launch/serve.py --model Qwen/Qwen3-32B``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tp_engine.config import EngineConfig
from tp_engine.options import Options
from tp_engine.options.launch import run_launched
from tp_engine.server.config import ServerConfig
from tp_engine.server.lifecycle import serve


def job(options: Options) -> int:
    """Serve until told to stop."""
    return serve(options.build("engine", EngineConfig), options.build("server", ServerConfig))


if __name__ == "__main__":
    sys.exit(run_launched("serve.py", __doc__, {"engine": EngineConfig, "server": ServerConfig}, job))
