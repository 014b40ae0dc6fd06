"""Structured output of the demo model, which knows no JSON, at the server's defaults: answers end, and parse.

Oracle: ``jsonschema``, the finish reason, and arithmetic if the schema leaves the answer to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.serving import warm_serving

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}
PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"
QUESTION = "12+34="
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


INTEGER = {"type": "integer"}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "number": INTEGER,
    "integer": closed(answer=INTEGER),
    "enum": closed(color={"enum": ["red", "green", "blue"]}),
    "nested": closed(sum=closed(a=INTEGER, b=INTEGER), ok={"type": "boolean"}),
    "any object": None,
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with warm_serving(2, "--device", "cpu", "--num-gpu-blocks-override", "512") as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0)


def response_format(schema: dict[str, Any] | None) -> Any:
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def chat(client: openai.OpenAI, schema: dict[str, Any] | None, *, stream: bool) -> tuple[str, str | None]:
    """The answer and why it ended."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    found: Any = client.chat.completions.create(
        model="demo_model", messages=messages, temperature=0, response_format=response_format(schema), stream=stream
    )
    if not stream:
        return found.choices[0].message.content, found.choices[0].finish_reason
    choices = [event.choices[0] for event in found if event.choices]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


def complete(client: openai.OpenAI, schema: dict[str, Any] | None, *, stream: bool) -> tuple[str, str | None]:
    """The answer and why it ended."""
    found: Any = client.completions.create(
        model="demo_model", prompt=PROMPT, temperature=0, max_tokens=400, stream=stream,
        extra_body={"response_format": response_format(schema)},
    )  # fmt: skip
    choices = [event.choices[0] for event in found] if stream else [found.choices[0]]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason


def respond(client: openai.OpenAI, schema: dict[str, Any] | None, *, stream: bool) -> tuple[str, str | None]:
    """The answer, and ``stop`` for a response that is complete."""
    asked = {"type": "json_object"} if schema is None else {"type": "json_schema", "name": "answer", "schema": schema}
    text: Any = {"format": asked}
    found: Any = client.responses.create(
        model="demo_model", input=QUESTION, temperature=0, text=text, stream=stream
    )  # fmt: skip
    if not stream:
        return found.output_text, "stop" if found.status == "completed" else found.status
    events = list(found)
    written = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return written, "stop" if events[-1].type == "response.completed" else events[-1].type


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [chat, complete, respond])
def test_answers_end_and_parse(client: openai.OpenAI, ask: Any, stream: bool) -> None:
    """Oracle: as in the module's docstring; every schema, at each endpoint."""
    for name, schema in SCHEMAS.items():
        text, finish_reason = ask(client, schema, stream=stream)
        assert finish_reason == "stop", (name, text)
        jsonschema.validate(json.loads(text), {"type": "object"} if schema is None else schema)
        if name == "number":
            assert json.loads(text) == 12 + 34


def test_the_examples_of_the_documentation(client: openai.OpenAI) -> None:
    """Oracle: docs/structured_output.md: the right sum, and the form of the others; words may vary by processor."""
    section = PAGE.read_text(encoding="utf-8")
    examples = re.findall(r"^(\{.*?)\n-> (.*?)$", section, re.DOTALL | re.MULTILINE)
    assert len(examples) == 3
    for body, expected in examples:
        reply = httpx.post(f"{client.base_url}chat/completions", content=body, headers=JSON, timeout=60).json()
        text = reply["choices"][0]["message"]["content"]
        asked, (found, shown) = json.loads(body), map(json.loads, (text, expected))
        if "structured_outputs" in asked:
            assert text == json.dumps(found, separators=(",", ":"))
        if isinstance(shown, dict):
            assert {name: type(value) for name, value in found.items()} == {"color": str, "sure": bool}
        else:
            assert found == shown == 12 + 34


def test_the_servers_own_white_space() -> None:
    """Oracle: ``json`` without blanks, for a request without an option for white space."""
    option = ("--structured-outputs-config", '{"disable_any_whitespace": true}')
    with warm_serving(1, "--device", "cpu", "--num-gpu-blocks-override", "256", *option) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0)
        text, finish_reason = chat(client, SCHEMAS["enum"], stream=False)
        assert finish_reason == "stop" and text == json.dumps(json.loads(text), separators=(",", ":"))
