"""Serve a model over HTTP: ``torchrun --nproc-per-node 8 launch/serve.py --model Qwen/Qwen3-32B``.

In a checkout, installed or not; an installed package has the same as ``-m tp_engine.serve``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tp_engine.serve import main

if __name__ == "__main__":
    sys.exit(main())
