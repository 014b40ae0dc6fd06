"""Run OpenAI batch requests: ``torchrun --nproc-per-node 8 -m tp_engine.batch --model M -i in.jsonl -o out.jsonl``."""

import sys

from tp_engine.cli.launched import BATCH_TABLES, batch_job
from tp_engine.options.launch import run_launched


def main() -> int:
    """Run this process's part of the job with the options of its command line; returns its exit code."""
    return run_launched("batch.py", __doc__, BATCH_TABLES, batch_job)


if __name__ == "__main__":
    sys.exit(main())
