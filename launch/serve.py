"""Serve a model over HTTP: ``torchrun --nproc-per-node 8 launch/serve.py --model Qwen/Qwen3-32B``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tp_engine.cli.jobs import SERVE_TABLES, serve_job
from tp_engine.options.launch import run_launched

if __name__ == "__main__":
    sys.exit(run_launched("serve.py", __doc__, SERVE_TABLES, serve_job))
