"""Run OpenAI batch requests: ``torchrun --nproc-per-node 8 launch/batch.py --model M -i in.jsonl -o out.jsonl``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tp_engine.api.batch import run_batch
from tp_engine.api.batch_config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.options import Options
from tp_engine.options.launch import run_launched
from tp_engine.server.lifecycle import run_interruptible


def job(options: Options) -> int:
    """Run the requests that have no result yet."""
    config, batch_config = options.build("engine", EngineConfig), options.build("batch", BatchConfig)
    return run_interruptible(lambda stop_requested: run_batch(config, batch_config, stop_requested=stop_requested))


if __name__ == "__main__":
    sys.exit(run_launched("batch.py", __doc__, {"engine": EngineConfig, "batch": BatchConfig}, job))
