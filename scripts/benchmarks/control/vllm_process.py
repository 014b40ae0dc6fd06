"""The other side of vllm_side.py: vLLM as a contender of the control-plane benchmark."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.control.readers import Times, Turn
from benchmarks.control.vllm_side import ANSWER

SCRIPTS = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.control.vllm_side"


class VllmProcess:
    """vLLM under the interpreter ``python``.  Raises ``RuntimeError`` with the end of its output if it fails."""

    name = "vLLM"

    def __init__(self, python: str) -> None:
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SCRIPTS)}
        self._process = subprocess.Popen(
            [python, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.version: str = self._read()["version"]

    def open(self, num_readers: int, num_rows: int, num_steps: int) -> None:
        """Begin a case: bring the scheduler to steady decode and attach the readers."""
        self._ask(open=[num_readers, num_rows, num_steps])

    def run_steps(self, times: Times, turn: Turn) -> None:
        """Do what ``readers.run_steps`` does, in vLLM's process."""
        values = self._ask(run=asdict(turn))
        for name, taken in values["phases"].items():
            times.phases.setdefault(name, []).extend(taken)
        times.num_bytes += values["num_bytes"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                values: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return values
        raise RuntimeError(f"vLLM's process ended with exit code {self._process.wait()}; its output tells why")
