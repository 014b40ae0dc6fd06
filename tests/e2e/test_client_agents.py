"""pi and OpenCode, agents for the command line, over each API that they speak, against a running server.

Both keep what the model thought only if they know it as thinking: over messages that takes a signature.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.frontend import END_OF_TURN, INFO, running_server
from tests.fake_engine import FakeEngine
from tp_engine.requests.request import EngineRequest
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

PI, OPENCODE = os.environ.get("TP_ENGINE_PI"), os.environ.get("TP_ENGINE_OPENCODE")
COMMANDS = ("echo said by the tool: $((6 * 7))", "echo said by the tool: $((6 * 8))")
PLAN = "<think>\nMy plan is to multiply.\n</think>\n\n"
DEADLINE_S = 150.0
TEMPLATE = """\
{%- for m in messages %}<{{ m.role }}>
    {%- if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip() }}\n</think>\n\n{% endif %}{{ m.content }}
    {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}"""


class Model:
    """Thinks and runs two commands at once; ends with what they said.  Keeps the prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, request: EngineRequest) -> list[int]:
        prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < 256).decode()
        self.prompts.append(prompt)
        said = [line for line in prompt.splitlines() if "said by the tool: 4" in line]
        calls = [{"name": "bash", "arguments": {"command": one, "description": "multiply"}} for one in COMMANDS]
        written = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        text = f"Done: {len(said)} answers" if said else f"{PLAN}I look.\n{written}"
        return [*text.encode(), END_OF_TURN]


def run(command: list[str], folder: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    home = {"HOME": str(folder), "XDG_CONFIG_HOME": f"{folder}/.config", "XDG_DATA_HOME": f"{folder}/.local/share"}
    return subprocess.run(
        command, cwd=folder, env=os.environ | home | settings, text=True, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip


def write(file: Path, settings: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def pi(folder: Path, url: str, api: str) -> subprocess.CompletedProcess[str]:
    model = {"id": "demo", "name": "demo", "reasoning": True, "input": ["text"], "contextWindow": 200_000}
    cost = {"cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0), "maxTokens": 8192}
    base = url if api == "anthropic-messages" else f"{url}/v1"
    local = {"baseUrl": base, "api": api, "apiKey": "sesame", "models": [model | cost]}
    write(folder / ".pi/agent/models.json", {"providers": {"local": local}})
    return run([str(PI), "-p", "--provider", "local", "--model", "demo", "What is 6 * 7, and 6 * 8?"], folder, {})


def opencode(folder: Path, url: str, package: str) -> subprocess.CompletedProcess[str]:
    models = {"demo": {"reasoning": True, "tool_call": True, "limit": {"context": 200_000, "output": 8192}}}
    local = {"npm": package, "options": {"baseURL": f"{url}/v1", "apiKey": "sesame"}, "models": models}
    settings = {"autoupdate": False, "provider": {"local": local}, "model": "local/demo", "small_model": "local/demo"}
    write(folder / ".config/opencode/opencode.json", settings)
    return run([str(OPENCODE), "run", "What is 6 * 7, and 6 * 8?"], folder, {})


def check(done: subprocess.CompletedProcess[str], model: Model) -> None:
    assert done.returncode == 0 and "Done: 2 answers" in done.stdout, (done.stdout[-2000:], done.stderr[-4000:])
    *_, last = model.prompts
    assert f"{PLAN}I look." in last and last.count("<tool_call>{") == 2, last[-2000:]


@pytest.fixture
def served(tmp_path: Path) -> Any:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    config = ServerConfig(
        port=0, generation_config="vllm", api_key=("sesame",), chat_template=str(template),
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3",
    )  # fmt: skip
    model = Model()
    with running_server(
        FakeEngine(model, model_info=msgspec.structs.replace(INFO, max_model_len=1 << 18)), config
    ) as server:
        yield server, model


@pytest.mark.skipif(PI is None, reason="pi is a package of npm; run scripts/test_clients")
@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
def test_pi_keeps_the_models_plan(tmp_path: Path, served: Any, api: str) -> None:
    """Oracle: the second prompt has the thinking as thinking and both calls, and the agent ends with both answers."""
    server, model = served
    check(pi(tmp_path, server.url, api), model)


@pytest.mark.skipif(OPENCODE is None, reason="OpenCode is a package of npm; run scripts/test_clients")
@pytest.mark.parametrize("package", ["openai-compatible", "anthropic"])
def test_opencode_keeps_the_models_plan(tmp_path: Path, served: Any, package: str) -> None:
    """Oracle: as above."""
    server, model = served
    check(opencode(tmp_path, server.url, f"@ai-sdk/{package}"), model)
