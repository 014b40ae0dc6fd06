"""``tp-engine chat`` starts its own server: one question to the demo model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.serving import ROOT

pytestmark = pytest.mark.slow

DEADLINE_S = 340.0


def test_a_chat_starts_a_server_and_ends_it() -> None:
    """Oracle: arithmetic; the fixtures check for processes and names left behind."""
    done = subprocess.run(
        [sys.executable, "-m", "tp_engine", "chat", "-q", "12+34=", "--num-gpu-blocks-override", "64"],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "46\n"), done.stderr
