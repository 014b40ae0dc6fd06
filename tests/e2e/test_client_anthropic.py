"""Anthropic's client against a running server: messages, streams, tools, token counts, its exception classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.e2e.frontend import DEADLINE_S, RunningServer, running_server
from tests.e2e.scripted import TEXT, client_config, scripted_engine

TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
ANSWERS = [TEXT, f"<think>hm, {TEXT}</think>\n\nyes", f"I look. {CALL}", f"<think>a</think>{CALL}{CALL}", ""]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(scripted_engine(), client_config()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="sesame", timeout=DEADLINE_S, max_retries=0) as made:
        yield made


def say(text: str, **fields: Any) -> Any:
    return {"model": "demo", "max_tokens": 400, "messages": [{"role": "user", "content": f"SAY:{text}"}]} | fields


def blocks(message: Message) -> list[Any]:
    """The blocks of a message without ids, which are random."""
    Message.model_validate(message.model_dump(mode="json"))
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]


def test_a_message(client: anthropic.Anthropic) -> None:
    """Oracle: the scripted answer; one token per byte and one for the end."""
    message = client.messages.create(**say(TEXT), system="Be kind.")
    assert blocks(message) == [{"type": "text", "text": TEXT}]
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        "demo",
        "end_turn",
    )
    assert message.usage.output_tokens == len(TEXT.encode()) + 1 and message.id.startswith("msg_")


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_stream_is_the_whole_message(client: anthropic.Anthropic, answer: str) -> None:
    """Oracle: the client's own sum of the events, and the whole message."""
    whole = client.messages.create(**say(answer), tools=[TOOL])
    with client.messages.stream(**say(answer), tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(final.content)
    assert blocks(final) == blocks(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole.stop_reason == ("tool_use" if CALL in answer else "end_turn")


def test_thinking_text_and_calls_are_blocks(client: anthropic.Anthropic) -> None:
    """Oracle: the scripted text, by the marks of its formats."""
    message = client.messages.create(**say(f"<think>a</think>b{CALL}"), tools=[TOOL])
    call = {"type": "tool_use", "name": "weather", "input": {"city": "Ulm"}, "caller": {"type": "direct"}}
    thought, text, called = blocks(message)
    assert thought == {"type": "thinking", "thinking": "a", "signature": thought["signature"]} and thought["signature"]
    assert text == {"type": "text", "text": "b"}
    assert {**call, **called} == call


def test_a_round_trip_of_a_tool(client: anthropic.Anthropic) -> None:
    """Oracle: the answer repeats what the tool said, which is the last text of the prompt."""
    asked = [{"role": "user", "content": f"SAY:{CALL}"}]
    first = client.messages.create(**say("", messages=asked), tools=[TOOL])
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[-1].id,
        "content": [{"type": "text", "text": "SAY:sun"}],
    }
    turns = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert blocks(client.messages.create(**say("", messages=turns), tools=[TOOL])) == [{"type": "text", "text": "sun"}]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call(client: anthropic.Anthropic, choice: Any) -> None:
    """Oracle: the scripted text has the form that the constraint asks of a model; the answer has one call."""
    arguments = {"city": "Ulm"}
    forced = json.dumps({"name": "weather", "arguments": arguments})
    message = client.messages.create(**say(f"<tool_call>\n{forced}\n</tool_call>"), tools=[TOOL], tool_choice=choice)
    assert message.stop_reason == "tool_use" and message.content[-1].input == arguments


def test_why_a_message_ends(client: anthropic.Anthropic) -> None:
    """Oracle: Anthropic's reference of stop reasons."""
    cut = client.messages.create(**say("abcdef", max_tokens=3))
    assert (cut.stop_reason, blocks(cut)) == ("max_tokens", [{"type": "text", "text": "abc"}])
    stopped = client.messages.create(**say("one END two", stop_sequences=["END"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    half = client.messages.create(**say(CALL, max_tokens=len(CALL) - 20), tools=[TOOL])
    assert half.stop_reason == "max_tokens" and all(isinstance(one.input, dict) for one in half.content)


def test_the_prompt_is_counted(client: anthropic.Anthropic) -> None:
    """Oracle: the usage of the same message; a token that was cached is counted apart."""
    body = say("x" * 50)
    counted = client.messages.count_tokens(model="demo", messages=body["messages"], system="Be kind.", tools=[TOOL])
    usage = client.messages.create(**body, system="Be kind.", tools=[TOOL]).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_an_assistant_text_is_continued(client: anthropic.Anthropic) -> None:
    """Oracle: the prompt ends within the message, so the scripted model repeats the text behind its mark."""
    turns = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "SAY:more"}]
    assert blocks(client.messages.create(**say("", messages=turns))) == [{"type": "text", "text": "more"}]


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "'other'"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"max_tokens": 10**7}, anthropic.BadRequestError, "exceed context limit: "),
        ({"messages": [{"role": "user", "content": "x" * 10**6}]}, anthropic.BadRequestError, "prompt is too long: "),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "image"),
        ({"messages": [{"role": "user", "content": [{"type": 7}]}]}, anthropic.BadRequestError, "content[0].type"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
    ],
)
def test_errors_are_the_clients_own(client: anthropic.Anthropic, fields: Any, kind: Any, words: str) -> None:
    """Oracle: the client's exception classes, and Anthropic's form of errors."""
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            client.messages.create(**(say("x") | fields), stream=stream)
        body: Any = raised.value.body
        assert body["type"] == "error" and words in body["error"]["message"], body
        assert body["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[raised.value.status_code]


def test_the_numbers_by_which_max_tokens_shrinks(server: RunningServer, client: anthropic.Anthropic) -> None:
    """Oracle: the length of the prompt, what was asked for and the context; the difference then fits."""
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**say("x", max_tokens=10**6))
    text: Any = raised.value.body
    numbers = [int(word.strip(",")) for word in text["error"]["message"].split() if word.strip(",").isdigit()]
    prompt, asked, longest = numbers
    assert asked == 10**6 and client.messages.create(**say("x", max_tokens=longest - prompt)).stop_reason == "end_turn"


def test_both_headers_have_the_key(server: RunningServer) -> None:
    """Oracle: 200 with either header, 401 in Anthropic's form without or with a wrong one."""
    body = say("x")
    for headers, status in (
        ({"x-api-key": "sesame"}, 200),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"x-api-key": "other"}, 401),
        ({"x-api-key": "sesame", "Authorization": "Bearer other"}, 200),
        ({}, 401),
    ):
        with anthropic.DefaultHttpxClient() as plain:
            reply = plain.post(f"{server.url}/v1/messages?beta=true", json=body, headers=headers, timeout=DEADLINE_S)
        assert reply.status_code == status, headers
        if status == 401:
            assert reply.json()["error"]["type"] == "authentication_error"


def test_unknown_paths_and_methods_have_the_form_too(server: RunningServer) -> None:
    """Oracle: Anthropic's form of errors, at its paths alone."""
    key = {"x-api-key": "sesame"}
    with anthropic.DefaultHttpxClient() as plain:
        for path, status in (("/v1/messages/none", 404), ("/v1/messages", 405)):
            reply = plain.get(server.url + path, headers=key)
            assert (reply.status_code, reply.json()["type"]) == (status, "error")
        assert "type" not in plain.get(f"{server.url}/v1/messagesx", headers=key).json()
