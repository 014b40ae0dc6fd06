"""Compare streams byte for byte with stored ones, so that the format does not change by accident.

Each case's events are in ``tests/golden/streams``, with ids and times replaced.  After an intended change,
``TP_ENGINE_UPDATE_GOLDEN=1 pytest tests/e2e/test_golden_streams.py`` writes them anew; read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.asgi import App, run_served
from tests.e2e.frontend import INFO
from tests.e2e.scripted import say
from tests.fake_engine import FakeEngine
from tp_engine.config import DEMO_MODEL
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.server.config import ServerConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "streams"
CHANGING = (
    (re.compile(rb'"(id|item_id|call_id)":"(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|call_)[0-9a-f]+"'), rb'"\1":"\g<2>ID"'),
    (re.compile(rb'"(created|created_at|completed_at)":\d+'), rb'"\1":0'),
)
# All answers are shorter than 64 tokens, because longer ones may reach a slow reader in fewer pieces.
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


USAGE = {"include_usage": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a😀b"}),
    "completion_echo": ("/v1/completions", {"prompt": "héy", "echo": True, "stream_options": USAGE}),
    "completion_two_choices": ("/v1/completions", {"prompt": "ab", "n": 2}),
    "completion_logprobs": ("/v1/completions", {"prompt": "é!", "logprobs": 2}),
    "completion_stop": ("/v1/completions", {"prompt": "ab中文cd", "stop": ["文c"]}),
    "completion_token_ids": ("/v1/completions", {"prompt": "ab", "return_token_ids": True}),
    "completion_continuous_usage": (
        "/v1/completions", {"prompt": "abc", "stream_options": USAGE | {"continuous_usage_stats": True}},
    ),
    "chat": ("/v1/chat/completions", {"messages": user("SAY:a😀b")}),
    "chat_length": ("/v1/chat/completions", {"messages": user("SAY:abcdef"), "max_tokens": 2}),
    "chat_two_choices": ("/v1/chat/completions", {"messages": user("SAY:ab"), "n": 2, "stream_options": USAGE}),
    "chat_logprobs": ("/v1/chat/completions", {"messages": user("SAY:é!"), "logprobs": True, "top_logprobs": 1}),
    "chat_tools": (
        "/v1/chat/completions", {"messages": user(f"SAY:{CALL}"), "tools": [{"type": "function", "function": TOOL}]},
    ),
    "response": ("/v1/responses", {"input": "SAY:a😀"}),
    "response_incomplete": ("/v1/responses", {"input": "SAY:abcdef", "max_output_tokens": 2, "top_logprobs": 1}),
    "response_reasoning": ("/v1/responses", {"input": "SAY:<think>Hm</think>ok"}),
    "response_tools": ("/v1/responses", {"input": f"SAY:{CALL}", "tools": [{"type": "function"} | TOOL]}),
}  # fmt: skip


def without_what_changes(stream: bytes) -> bytes:
    for pattern, replacement in CHANGING:
        stream = pattern.sub(replacement, stream)
    return stream


def test_streams_are_as_they_were() -> None:
    """Oracle: the stored files; a person reads each change of them."""
    engine = FakeEngine(say, model_info=INFO)
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    update = os.environ.get("TP_ENGINE_UPDATE_GOLDEN") == "1"
    streams: dict[str, bytes] = {}

    async def scenario(app: App) -> None:
        for name, (path, body) in CASES.items():
            reply = await app.post(path, body | {"stream": True, "model": "demo"})
            assert reply.status == 200, (name, reply.content)
            streams[name] = without_what_changes(reply.content)

    run_served(scenario, engine, load_tokenizer(str(DEMO_MODEL), None), config)
    for name, stream in streams.items():
        file = GOLDEN / f"{name}.sse"
        if update:
            file.write_bytes(stream)
        assert stream.decode().splitlines() == file.read_bytes().decode().splitlines(), name
    if update:
        pytest.fail("the golden streams were written anew; run again without TP_ENGINE_UPDATE_GOLDEN")
