"""Forced tool calls from a model that knows no tools: the grammar alone makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.asgi import App, run_served
from tests.tiny_server import assert_nothing_in_use, chat_tokenizer, tiny_engine
from tp_engine.server.config import ServerConfig

PARAMETERS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}
# The prompt is short because the model's context is short.
CONFIG = ServerConfig(chat_template="{{ messages[0].content }}")


def body(**fields: Any) -> dict[str, Any]:
    """A request that forbids tokens with a space, because a random model would fill its context with spaces."""
    tokenizer = chat_tokenizer()
    solid = [token_id for token_id in range(len(tokenizer)) if not any(map(str.isspace, tokenizer.decode([token_id])))]
    return {
        "model": "demo", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS, "allowed_token_ids": solid,
        "parallel_tool_calls": False, "seed": 3, **fields,
    }  # fmt: skip


def arguments_of(events: list[Any]) -> str:
    calls = [call for event in events for one in event["choices"] for call in one["delta"].get("tool_calls", ())]
    return "".join(call["function"]["arguments"] for call in calls)


def test_calls_by_grammar(tmp_path: Path) -> None:
    """Oracle: the tools' names and schema; a stream with the same seed gives the same calls; all blocks come back."""

    async def scenario(app: App) -> None:
        for choice, names, reason in ((NAMED, {"g"}, "stop"), ("required", {"f", "g"}, "tool_calls")):
            request = body(tool_choice=choice)
            answer = (await app.post("/v1/chat/completions", request | {"n": 2})).json()["choices"]
            for one in answer:
                assert one["finish_reason"] == reason and one["message"]["content"] is None
                (call,) = one["message"]["tool_calls"]
                assert call["function"]["name"] in names
                assert json.loads(call["function"]["arguments"])["n"] in (1, 2, 3)
            whole = (await app.post("/v1/chat/completions", request)).json()["choices"][0]["message"]["tool_calls"]
            events = (await app.post("/v1/chat/completions", request | {"stream": True})).events
            assert arguments_of(events) == whole[0]["function"]["arguments"]
            assert events[-1]["choices"][0]["finish_reason"] == reason

    with tiny_engine(tmp_path) as engine:
        run_served(scenario, engine, chat_tokenizer(), CONFIG)
        assert_nothing_in_use(engine)
