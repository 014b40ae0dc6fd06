"""OpenAI's Codex, the agent for the command line, as its users start it, against a running server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.e2e.frontend import END_OF_TURN, INFO, running_server
from tests.fake_engine import FakeEngine
from tp_engine.requests.request import EngineRequest
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

CODEX = os.environ.get("TP_ENGINE_CODEX")
COUNT = "echo said by the tool: $((6 * 7))"
PATCH = """apply_patch <<'END'
*** Begin Patch
*** Update File: greeting.txt
@@
-hello
+hello, world
*** End Patch
END"""
READ = "echo said by the tool: $(cat greeting.txt)"
DEADLINE_S = 120.0


def act(request: EngineRequest, commands: Sequence[str]) -> list[int]:
    """Run the commands with a tool, one after the other, and end with the last one's output."""
    prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < 256).decode()
    _, *outputs = prompt.split("tool\n")
    if len(outputs) < len(commands):
        call = {"name": "exec_command", "arguments": {"cmd": commands[len(outputs)]}}
        text = f"I look. <tool_call>{json.dumps(call)}</tool_call>"
    else:
        text = "Done: " + next(line for line in outputs[-1].splitlines() if "said by" in line)
    return [*text.encode(), END_OF_TURN]


@pytest.mark.skipif(CODEX is None, reason="Codex is a package of npm; run scripts/test_clients")
@pytest.mark.parametrize(
    ("commands", "output"), [([COUNT], "42"), ([PATCH, READ], "hello, world")], ids=["run", "edit"]
)
def test_codex_exec(tmp_path: Path, commands: list[str], output: str) -> None:
    """Oracle: the command's own output comes back through the model, and the agent ends with that answer.

    The patch is an edit of a file as Codex asks its models for.
    """
    assert CODEX is not None
    provider = 'model_providers.local={name="local", base_url="%s/v1", wire_api="responses"}'
    engine = FakeEngine(
        partial(act, commands=commands), model_info=msgspec.structs.replace(INFO, max_model_len=1 << 18)
    )
    config = ServerConfig(port=0, generation_config="vllm", enable_auto_tool_choice=True, tool_call_parser="hermes")
    last, edited = tmp_path / "last", tmp_path / "greeting.txt"
    edited.write_text("hello\n")
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
    assert last.read_text() == f"Done: said by the tool: {output}", done.stderr[-4000:]
    assert edited.read_text() == ("hello, world\n" if PATCH in commands else "hello\n")
