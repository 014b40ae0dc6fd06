"""OpenAI's Codex, the agent for the command line, as its users start it, against a running server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.e2e.frontend import END_OF_TURN, INFO, running_server
from tests.fake_engine import FakeEngine
from tp_engine.request import EngineRequest
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

CODEX = os.environ.get("TP_ENGINE_CODEX")
CALL = {"name": "exec_command", "arguments": {"cmd": "echo said by the tool: $((6 * 7))"}}
DEADLINE_S = 120.0


def act(request: EngineRequest) -> list[int]:
    """Call a tool; when the conversation has its output, end with that."""
    prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < 256).decode()
    _, answered, output = prompt.rpartition("tool\n")
    said = "Done: " + next(line for line in output.splitlines() if "said by" in line) if answered else "I look. "
    text = said if answered else f"{said}<tool_call>{json.dumps(CALL)}</tool_call>"
    return [*text.encode(), END_OF_TURN]


@pytest.mark.skipif(CODEX is None, reason="Codex is a package of npm; run scripts/test_clients")
def test_codex_exec(tmp_path: Path) -> None:
    """Oracle: the command's own output comes back through the model, and the agent ends with that answer."""
    assert CODEX is not None
    provider = 'model_providers.local={name="local", base_url="%s/v1", wire_api="responses"}'
    engine = FakeEngine(act, model_info=msgspec.structs.replace(INFO, max_model_len=1 << 18))
    config = ServerConfig(port=0, generation_config="vllm", enable_auto_tool_choice=True, tool_call_parser="hermes")
    last = tmp_path / "last"
    with running_server(engine, config) as server:
        done = subprocess.run(
            [
                CODEX, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-c", provider % server.url,
                "-c", "model_provider=local", "-m", "demo", "--output-last-message", str(last), "What is 6 * 7?",
            ],
            cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path), "CODEX_HOME": str(tmp_path)}, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S,
        )  # fmt: skip
        server.wait_idle()
    assert done.returncode == 0, done.stderr[-4000:]
    assert last.read_text() == "Done: said by the tool: 42", done.stderr[-4000:]
