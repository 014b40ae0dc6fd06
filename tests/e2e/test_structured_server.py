"""Structured output through the server: request fields, answers, streams and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from tests.asgi import App, run_served
from tests.tiny_server import assert_nothing_in_use, chat_tokenizer, tiny_engine

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TIGHT: dict[str, Any] = {"json": SCHEMA, "disable_any_whitespace": True}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        "type: no",
        "response_format",
    ),
    ({"structured_outputs": {"regex": "("}}, "unclosed group", "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "choice is []", "structured_outputs"),
    ({"guided_grammar": "root ::= x"}, "'x' not found", "guided_grammar"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_json: json and regex of", "guided_json"),
]


async def check_answers(app: App) -> None:
    """Oracle: ``jsonschema`` and the choices, for chats and completions, several at once, whole and streamed."""
    chat = {"messages": MESSAGES, "structured_outputs": TIGHT, "max_tokens": 40, "n": 2, "temperature": 1.5}
    reply = (await app.post("/v1/chat/completions", chat)).json()
    for choice in reply["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
    prompts = {"prompt": ["a", "b"], "guided_choice": ["left", "right"], "temperature": 1.0, "stream": True}
    streamed = await app.post("/v1/completions", prompts)
    texts = {0: "", 1: ""}
    for event in streamed.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) <= {"left", "right"}
    whole = {"messages": MESSAGES, "response_format": JSON_SCHEMA, "temperature": 0, "max_tokens": 60, "seed": 1}
    first = (await app.post("/v1/chat/completions", whole)).json()["choices"][0]
    events = (await app.post("/v1/chat/completions", {**whole, "stream": True})).events
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == first["message"]["content"]
    assert first["finish_reason"] == "length" or jsonschema.validate(json.loads("".join(pieces)), SCHEMA) is None


async def check_refusals(app: App) -> None:
    """Oracle: 400 in the OpenAI shape instead of a stream, also for errors that only the grammar library finds."""
    for fields, text, param in REFUSED:
        for stream in (False, True):
            reply = await app.post("/v1/chat/completions", {"messages": MESSAGES, "stream": stream, **fields})
            assert reply.status == 400, reply.content
            error = reply.json()["error"]
            assert text in error["message"] and error["param"] == param


def test_structured_output_through_the_server(tmp_path: Path) -> None:
    with tiny_engine(tmp_path / "model") as engine:

        async def scenario(app: App) -> None:
            await check_answers(app)
            await check_refusals(app)

        run_served(scenario, engine, chat_tokenizer())
        assert_nothing_in_use(engine)
