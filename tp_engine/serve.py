"""Serve a model over HTTP: ``torchrun --nproc-per-node 8 -m tp_engine.serve --model Qwen/Qwen3-32B``."""

import sys

from tp_engine.cli.launched import SERVE_TABLES, serve_job
from tp_engine.options.launch import run_launched


def main() -> int:
    """Run this process's part of the job with the options of its command line; returns its exit code."""
    return run_launched("serve.py", __doc__, SERVE_TABLES, serve_job)


if __name__ == "__main__":
    sys.exit(main())
