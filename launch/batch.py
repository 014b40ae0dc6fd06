"""Run OpenAI batch requests: ``torchrun --nproc-per-node 8 launch/batch.py --model M -i in.jsonl -o out.jsonl``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tp_engine.cli.jobs import BATCH_TABLES, batch_job
from tp_engine.options.launch import run_launched

if __name__ == "__main__":
    sys.exit(run_launched("batch.py", __doc__, BATCH_TABLES, batch_job))
