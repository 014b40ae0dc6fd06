"""Run OpenAI batch requests: ``torchrun --nproc-per-node 8 launch/batch.py --model M -i in.jsonl -o out.jsonl``.

For a checkout, installed or not; for an installed package, the same is ``-m tp_engine run-batch``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tp_engine.apps.batch.command import main

if __name__ == "__main__":
    sys.exit(main(prog="batch.py"))
