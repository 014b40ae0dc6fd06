"""SmolLM2 in float32 behind the HTTP server: chats that a user would have with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.serving import serving

pytestmark = pytest.mark.slow

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "64")
TOOL_OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "is_student": {"type": "boolean"}},
    "required": ["name", "age", "is_student"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[openai.OpenAI]:
    with serving(0, "--model", str(smollm2), *OPTIONS, *TOOL_OPTIONS, timeout_s=300) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120, max_retries=0)


def chat(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    made: Any = client.chat.completions
    return made.create(**{"model": "SmolLM2-135M-Instruct", "messages": messages, "temperature": 0, **options})


@pytest.mark.timeout(600)
def test_the_capital_of_france(client: openai.OpenAI) -> None:
    """Oracle: geography; the answer ends with the model's own end of a turn, which is not shown."""
    answer = chat(client, FRANCE, max_tokens=48)
    assert "Paris" in answer.choices[0].message.content
    assert "<|" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < 48


@pytest.mark.timeout(600)
def test_a_streamed_chat_of_two_turns(client: openai.OpenAI) -> None:
    """Oracle: the same chat, not streamed; more than one chunk has text."""
    answer = chat(client, FRANCE, max_tokens=48)
    messages = [*FRANCE, {"role": "assistant", "content": answer.choices[0].message.content}]
    messages.append({"role": "user", "content": "Which river flows through it?"})
    whole = chat(client, messages, max_tokens=32).choices[0]
    chunks = list(chat(client, messages, max_tokens=32, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == whole.message.content and len(pieces) > 3
    assert chunks[-2].choices[0].finish_reason == whole.finish_reason
    assert chunks[-1].usage.prompt_tokens > 0


@pytest.mark.timeout(600)
def test_json_by_schema(client: openai.OpenAI) -> None:
    """Oracle: jsonschema."""
    question = [{"role": "user", "content": "Anna is 21 years old and studies law. Describe her as JSON."}]
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = chat(client, question, response_format=schema, max_tokens=96).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), PERSON)


@pytest.mark.timeout(600)
def test_a_tool_s_round_trip(client: openai.OpenAI) -> None:
    """Oracle: the tool's name and schema; the tool's result goes back, and the answer ends by itself.

    The model has not learned tools: the call is forced, and one alone, because it would repeat it without an end.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    asked = chat(client, messages, **forced, max_tokens=96).choices[0]
    assert asked.finish_reason == "tool_calls"
    call = asked.message.tool_calls[0]
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    messages.append(asked.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Paris: sunny, 24 degrees"})
    answer = chat(client, messages, tools=[WEATHER], tool_choice="none", max_tokens=64).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content
