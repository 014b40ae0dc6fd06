"""The order of an answer: whole answers of messages and responses have the blocks of streams, and are sent back so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.asgi import App
from tests.unit.api.test_chat_answers import CALL, QUESTION, last_request, serve, speaking

OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
WEATHER: tuple[Any, ...] = ("call", "get_weather", {"city": "Köln 😀"})
TIME: tuple[Any, ...] = ("call", "get_time", {})
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("get_weather", "get_time")]
FUNCTIONS = [{"type": "function", "name": one["name"], "parameters": one["input_schema"]} for one in TOOLS]
ANSWERS: list[tuple[str, list[Any]]] = [
    (f"A.\n{CALL}\nB.", [("text", "A."), WEATHER, ("text", "B.")]),
    (f"{CALL}\nmid\n{OTHER}", [WEATHER, ("text", "mid"), TIME]),
    (f"<think>\nplan\n</think>\n\nA.\n{CALL}\n{OTHER}\nB.",
     [("thinking", "plan"), ("text", "A."), WEATHER, TIME, ("text", "B.")]),
    (f"<think>\nplan\n</think>\n\n{CALL}", [("thinking", "plan"), WEATHER]),
    ("plain", [("text", "plain")]),
]  # fmt: skip


def blocks(message: Any) -> list[tuple[Any, ...]]:
    """The blocks of a message; texts without white space around them."""
    found: list[tuple[Any, ...]] = []
    for block in message["content"]:
        kind = block["type"]
        found.append(("call", block["name"], block["input"]) if kind == "tool_use" else (kind, block[kind].strip()))
    return found


def streamed_blocks(events: list[Any]) -> list[tuple[Any, ...]]:
    """The blocks that the events of a message make, by the rules of Anthropic's SDK."""
    content: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            elif delta["type"] != "signature_delta":
                block[block["type"]] += delta[block["type"]]
    for block in content:
        if block["json"]:
            block["input"] = json.loads(block["json"])
    return blocks({"content": content})


def items(response: Any) -> list[tuple[Any, ...]]:
    """The items of a response, as ``blocks``."""
    found: list[tuple[Any, ...]] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            found.append(("call", item["name"], json.loads(item["arguments"])))
        else:
            kind = "thinking" if item["type"] == "reasoning" else "text"
            found.append((kind, item["content"][0]["text"].strip()))
    return found


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_the_order_of_whole_answers(text: str, expected: list[Any]) -> None:
    """Oracle: the text of the model, by hand; the stream of the same request."""

    async def scenario(app: App) -> None:
        message = {"max_tokens": 500, "messages": [QUESTION], "tools": TOOLS}
        response = {"input": "hi", "tools": FUNCTIONS}
        assert blocks((await app.post("/v1/messages", message)).json()) == expected
        assert streamed_blocks((await app.post("/v1/messages", message | {"stream": True})).events) == expected
        assert items((await app.post("/v1/responses", response)).json()) == expected
        events = (await app.post("/v1/responses", response | {"stream": True})).events
        assert items(events[-1]["response"]) == expected

    serve(speaking(text), scenario)


@pytest.mark.parametrize(("text", "expected"), [one for one in ANSWERS if WEATHER in one[1]])
def test_an_answer_that_is_sent_back_keeps_its_order(text: str, expected: list[Any]) -> None:
    """Oracle: each piece stands in the next prompt in the order of the model, and the tool's answer behind its call."""

    async def scenario(app: App) -> None:
        message = {"max_tokens": 500, "messages": [QUESTION], "tools": TOOLS}
        said = (await app.post("/v1/messages", message)).json()["content"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "sun"}
            for block in said
            if block["type"] == "tool_use"
        ]
        turns = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
        assert (await app.post("/v1/messages", message | {"messages": turns})).status == 200
        check(app)
        output = (await app.post("/v1/responses", {"input": "hi", "tools": FUNCTIONS})).json()["output"]
        answers = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
            for item in output
            if item["type"] == "function_call"
        ]
        sent = [{"role": "user", "content": "hi"}, *output, *answers]
        assert (await app.post("/v1/responses", {"input": sent, "tools": FUNCTIONS})).status == 200
        check(app)

    def check(app: App) -> None:
        prompt = bytes(one for one in last_request(app).prompt_token_ids if one < 256).decode()
        prompt = prompt[prompt.rindex("</tools>") if "</tools>" in prompt else 0 :]
        wanted = [one[1] if one[0] == "text" else f'"name": "{one[1]}"' for one in expected if one[0] != "thinking"]
        places = [prompt.index(piece) for piece in (*wanted, "sun")]
        assert places == sorted(places), prompt

    serve(speaking(text), scenario)


@pytest.mark.parametrize(
    "arguments", ['{"city": ', '["Ulm"]', '"Ulm"', "5", '{"city": "Ulm",}', "[" * 300], ids=lambda one: one[:16]
)
def test_arguments_that_are_no_object_are_no_empty_call(arguments: str) -> None:
    """Oracle: what the model wrote, in an object as Anthropic's documentation advises: an agent never runs the tool
    with defaults.  Sent back, the model sees it."""

    async def scenario(app: App) -> None:
        message = {"max_tokens": 800, "messages": [QUESTION], "tools": TOOLS}
        said = (await app.post("/v1/messages", message)).json()["content"]
        uses = [block for block in said if block["type"] == "tool_use"]
        for use in uses:
            assert list(use["input"]) == ["INVALID_JSON"] and use["input"]["INVALID_JSON"].startswith(arguments.strip())
        assert uses or arguments.strip() in "".join(block.get("text", "") for block in said)
        result = {"type": "tool_result", "tool_use_id": "x", "content": "sun"}
        turns = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        assert (await app.post("/v1/messages", message | {"messages": turns})).status == 200
        prompt = bytes(one for one in last_request(app).prompt_token_ids if one < 256).decode()
        assert not uses or "INVALID_JSON" in prompt

    serve(speaking(f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}\n</tool_call>'), scenario)
