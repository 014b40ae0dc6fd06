"""Serve a model over HTTP: ``torchrun --nproc-per-node 8 launch/serve.py --model Qwen/Qwen3-32B``.

For a checkout, installed or not; for an installed package, the same is ``-m tp_engine serve``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # until the server sets its handlers, as the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"stopped\n"), os._exit(0)))

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tp_engine.cli.serve import main

if __name__ == "__main__":
    sys.exit(main(prog="serve.py"))
