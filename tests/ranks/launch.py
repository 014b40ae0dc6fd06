"""Start a module of this repository under torchrun with a deadline, and leave no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A small engine whose LLM starts a second rank itself.
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "device": "cpu",
    "num_gpu_blocks_override": 32,
    "max_model_len": 64,
    "flight_recorder_dir": "",
}


def torchrun(
    num_ranks: int,
    target: Sequence[str],
    *,
    meeting: Sequence[str] = ("--standalone",),
    wrap: Callable[[Sequence[str]], Sequence[str]] = list,
    timeout_s: float = 340.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun --nproc-per-node num_ranks target...``; the whole process group is killed at the deadline.

    ``meeting`` tells torchrun where the ranks meet; ``wrap`` makes the command run elsewhere.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(num_ranks)]
    process = subprocess.Popen(
        wrap([*command, *target]),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"torchrun did not end within {timeout_s:g} s:\n{output[-6000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")
