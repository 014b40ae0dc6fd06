"""litellm against a running server, in an environment of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.frontend import running_server
from tests.e2e.scripted import scripted_engine
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "litellm_client.py"
PYTHON = os.environ.get("TP_ENGINE_CLIENTS_PYTHON") or (
    sys.executable if importlib.util.find_spec("litellm") is not None else None
)
SAID = "héllo 😀 中文"


@pytest.mark.skipif(PYTHON is None, reason="litellm wants older libraries than the server; run scripts/test_clients")
def test_litellm(tmp_path: Path) -> None:
    """Oracle: the scripted answers; errors are litellm's own classes."""
    assert PYTHON is not None
    config = ServerConfig(
        port=0, generation_config="vllm", enable_auto_tool_choice=True, tool_call_parser="hermes",
        batch_storage_dir=str(tmp_path),
    )  # fmt: skip
    with running_server(scripted_engine(), config) as server:
        done = subprocess.run([PYTHON, str(PROGRAM), server.url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    num_tokens = len(SAID.encode()) + 1
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "whole": SAID,
        "num_tokens": num_tokens,
        "streamed": SAID,
        "streamed_num_tokens": num_tokens,
        "call": ["weather", {"city": "Oslo"}],
        "completion": SAID,
        "response": SAID,
        "batches": 2 * [["completed", ["line 0", "line 1", "line 2"]]],
        "together": [str(number) for number in range(8)],
        "errors": ["NotFoundError", "ContextWindowExceededError", "BadRequestError"],
    }
