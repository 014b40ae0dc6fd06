"""Claude Code, Anthropic's agent for the command line, as its users start it, against a running server."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.e2e.frontend import END_OF_TURN, INFO, running_server
from tests.fake_engine import FakeEngine
from tp_engine.requests.request import EngineRequest
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

CLAUDE = os.environ.get("TP_ENGINE_CLAUDE_CODE")
CALL = {"name": "Bash", "arguments": {"command": "echo said by the tool: $((6 * 7))", "description": "multiply"}}
DEADLINE_S = 120.0


def act(request: EngineRequest, asked: list[tuple[int, int | None]]) -> list[int]:
    """Call a tool; when the conversation has its output, end with that.  Notes the sizes of prompt and answer."""
    asked.append((len(request.prompt_token_ids), request.params.max_tokens))
    prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < 256).decode()
    lines = [line for line in prompt.splitlines() if line.startswith("said by the tool: ")]
    text = f"Done: {lines[-1]}" if lines else f"I look. <tool_call>{json.dumps(CALL)}</tool_call>"
    return [*text.encode(), END_OF_TURN]


def ask(folder: Path, url: str, key: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": "demo",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HOME": str(folder),
    }
    return subprocess.run(
        [str(CLAUDE), "-p", "What is 6 * 7?", "--output-format", "json", "--allowed-tools", "Bash"],
        cwd=folder, env=os.environ | settings, text=True, stdin=subprocess.DEVNULL, capture_output=True,
        timeout=DEADLINE_S,
    )  # fmt: skip


@pytest.mark.skipif(CLAUDE is None, reason="Claude Code is a package of npm; run scripts/test_clients")
@pytest.mark.parametrize("max_model_len", [1 << 18, 40_000])
def test_claude_prints_an_answer(tmp_path: Path, max_model_len: int) -> None:
    """Oracle: the command's own output comes back through the model, and the agent ends with that answer.

    Claude Code asks for more tokens than a small context has, and again for fewer by the numbers of the error.
    """
    asked: list[tuple[int, int | None]] = []
    engine = FakeEngine(
        partial(act, asked=asked), model_info=msgspec.structs.replace(INFO, max_model_len=max_model_len)
    )
    config = ServerConfig(
        port=0, generation_config="vllm", api_key=("sesame",), enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    with running_server(engine, config) as server:
        done = ask(tmp_path, server.url, "sesame")
        server.wait_idle()
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    answer = json.loads(done.stdout)
    assert asked and all(prompt + (most or 0) <= max_model_len for prompt, most in asked)
    assert (answer["result"], answer["is_error"]) == ("Done: said by the tool: 42", False), answer


@pytest.mark.skipif(CLAUDE is None, reason="Claude Code is a package of npm; run scripts/test_clients")
def test_claude_says_at_once_that_the_key_is_wrong(tmp_path: Path) -> None:
    """Oracle: an end with that status; without the header of the refusal it tries for some three minutes."""
    engine = FakeEngine(partial(act, asked=[]), model_info=INFO)
    with running_server(engine, ServerConfig(port=0, api_key=("sesame",))) as server:
        done = ask(tmp_path, server.url, "wrong")
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and (answer["is_error"], answer["api_error_status"]) == (True, 401), answer
