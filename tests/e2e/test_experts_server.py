"""A tiny gpt-oss on two ranks behind the server: a chat with a forced tool call, and the metrics of its experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serving import warm_serving
from tests.tiny_models import make_checkpoint
from tests.tiny_server import chat_tokenizer

pytestmark = pytest.mark.slow

PARAMETERS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}]
FORCED: Any = {"type": "function", "function": {"name": "lookup"}}


def test_a_chat_with_a_forced_tool_call(tmp_path: Path) -> None:
    """Oracle: the tool's schema; a stream with the same seed gives the same call; the mean load of the experts is 1."""
    folder = make_checkpoint(tmp_path / "gpt-oss", "gpt-oss", vocab_size=384)
    chat_tokenizer().save_pretrained(folder)
    options = ["--model", str(folder), "--device", "cpu", "--num-gpu-blocks-override", "64", "--dtype", "float32"]
    parsers = ["--tool-call-parser", "openai", "--reasoning-parser", "openai_gptoss", "--enable-auto-tool-choice"]
    with warm_serving(2, *options, *parsers) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0)
        request: dict[str, Any] = {
            "model": folder.name,
            "messages": [{"role": "user", "content": "go"}],
            "tools": TOOLS,
            "tool_choice": FORCED,
            "seed": 3,
            "max_tokens": 150,  # a token is a byte
            # The channel is "commentary", with a call; reasoning in "analysis" would never end.
            "logit_bias": {str(chat_tokenizer().encode("c")[-1]): 100},
        }
        called = client.chat.completions.create(**request).choices[0].message
        assert called.tool_calls is not None and len(called.tool_calls) == 1 and not called.content
        call = called.tool_calls[0]
        assert call.type == "function" and call.function.name == "lookup"
        assert json.loads(call.function.arguments)["n"] in (1, 2, 3)
        chunks = client.chat.completions.create(**request, stream=True)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        pieces = [one.function.arguments or "" for delta in deltas for one in delta.tool_calls or () if one.function]
        assert "".join(pieces) == call.function.arguments
        text = httpx.get(server.url + "/metrics", timeout=30).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("tp_engine:expert")]
    found = {line: float(value) for line, _, value in lines}
    assert next(value for name, value in found.items() if "max_over_mean" in name) >= 1.0
    assert sum(value for name, value in found.items() if "experts_by_load" in name) == 2 * 6  # layers, experts
