"""The official client against a running server: responses, helpers that parse, and its exception classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.e2e.frontend import DEADLINE_S, RunningServer, running_server
from tests.e2e.scripted import TEXT, City, client_config, scripted_engine


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(scripted_engine(), client_config()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sesame", timeout=DEADLINE_S, max_retries=0) as made:
        yield made


def checked(response: Response) -> Response:
    """Check the response's JSON strictly against the client's types, and return the response."""
    return Response.model_validate(response.model_dump(mode="json"))


def test_a_response(client: openai.OpenAI) -> None:
    """Oracle: the scripted answer; one token per byte and one for the end."""
    answer = client.responses.create(model="demo", input=f"SAY:{TEXT}", instructions="Be kind.", metadata={"k": "v"})
    assert answer.output_text == TEXT and answer.status == "completed" and answer.id.startswith("resp_")
    assert answer.usage is not None and answer.usage.output_tokens == len(TEXT.encode()) + 1
    assert answer.metadata == {"k": "v"} and answer.instructions == "Be kind."
    checked(answer)


def test_a_response_that_is_cut_off(client: openai.OpenAI) -> None:
    """Oracle: the status and the reason in the OpenAI reference."""
    answer = client.responses.create(model="demo", input="SAY:abcdef", max_output_tokens=3)
    assert (answer.output_text, answer.status) == ("abc", "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    checked(answer)


def test_a_turn_can_be_sent_back(client: openai.OpenAI) -> None:
    """Oracle: the engine repeats the conversation; the next request's input has the answer's items unchanged."""
    first = client.responses.create(model="demo", input="SAY:one", store=False)
    items: list[Any] = [{"role": "user", "content": "SAY:one"}, *first.output, {"role": "user", "content": "go on"}]
    second = client.responses.create(model="demo", input=items)
    assert second.status == "completed" and second.output_text


@pytest.mark.parametrize("max_output_tokens", [None, 5])
def test_a_streamed_response_equals_the_whole(client: openai.OpenAI, max_output_tokens: int | None) -> None:
    """Oracle: the whole response; log-probabilities come with the deltas, and that of the end token comes last."""
    request: dict[str, Any] = {"model": "demo", "input": f"SAY:{TEXT}", "top_logprobs": 2}
    if max_output_tokens is not None:
        request["max_output_tokens"] = max_output_tokens
    request["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**request)
    kinds, text, logprobs, all_logprobs, last = [], "", [], [], None
    for number, event in enumerate(client.responses.create(**request, stream=True)):
        assert event.sequence_number == number
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
            logprobs += event.logprobs
        elif event.type == "response.output_text.done":
            all_logprobs = event.logprobs
        last = event
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == ("response.completed" if max_output_tokens is None else "response.incomplete")
    assert last is not None and last.response.status == whole.status and last.response.usage == whole.usage
    assert text == whole.output_text == last.response.output_text
    tokens = [one.token for one in all_logprobs]
    assert len(tokens) == whole.usage.output_tokens and [one.token for one in logprobs] == tokens[: len(logprobs)]
    assert tokens == [one.token for one in whole.output[0].content[0].logprobs]


def test_the_stream_helper(client: openai.OpenAI) -> None:
    """Oracle: the client's own accumulator, which raises on events out of order."""
    with client.responses.stream(model="demo", input='SAY:{"name": "Oslo", "people": 7}', text_format=City) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == final.output_text
    assert final.output_parsed == City(name="Oslo", people=7)


def test_parsed_answers(client: openai.OpenAI) -> None:
    """Oracle: the client's own parsing of both endpoints."""
    said = 'SAY:{"name": "Oslo", "people": 7}'
    parsed = client.responses.parse(model="demo", input=said, text_format=City)
    assert parsed.output_parsed == City(name="Oslo", people=7)
    chat = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": said}], response_format=City
    )
    assert chat.choices[0].message.parsed == City(name="Oslo", people=7)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 😀"}}\n</tool_call>'
THINKS_AND_CALLS = f"SAY:<think>Which city?</think>I look.\n{CALL}\n{CALL}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
CHAT_WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def test_reasoning_and_calls_in_responses(client: openai.OpenAI) -> None:
    """Oracle: the scripted answer, item by item; the stream ends with the same items; they can be sent back."""
    request: dict[str, Any] = {"model": "demo", "input": THINKS_AND_CALLS, "tools": [WEATHER]}
    whole = checked(client.responses.create(**request))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    items: list[Any] = [*whole.output]
    thought, _, call, other = items
    assert thought.content[0].text == "Which city?" and whole.output_text.strip() == "I look."
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo 😀"}') and call.call_id != other.call_id
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(**request) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == '{"city": "Oslo 😀"}' * 2
    assert [shown(item) for item in final.output] == [shown(item) for item in whole.output]
    results = [{"type": "function_call_output", "call_id": one.call_id, "output": "rain"} for one in (call, other)]
    items = [{"role": "user", "content": "Weather?"}, *whole.output, *results]
    items.append({"role": "user", "content": "SAY:It rains."})
    answer = client.responses.create(model="demo", input=items, tools=[WEATHER])
    assert answer.output_text == "It rains."


def shown(item: Any) -> dict[str, Any]:
    """An item without its id and other fields that differ in each answer."""
    drop = {"id", "call_id", "parsed_arguments", "parsed"}
    item = item.model_dump(mode="json", exclude_none=True)
    for part in item.get("content") or ():
        part.pop("parsed", None)
    return {name: value for name, value in item.items() if name not in drop}


def test_reasoning_and_calls_in_chats(client: openai.OpenAI) -> None:
    """Oracle: the scripted answer; the client's stream helper accumulates the same message."""
    request: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": THINKS_AND_CALLS}],
        "tools": [CHAT_WEATHER],
    }
    choice = client.chat.completions.create(**request).choices[0]
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and len(calls) == 2
    assert all(call.type == "function" and call.function.arguments == '{"city": "Oslo 😀"}' for call in calls)
    with client.chat.completions.stream(**request) as stream:
        stream.until_done()
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and (streamed.message.content or "") == (choice.message.content or "")
    functions = [call.function for call in streamed.message.tool_calls or []]
    assert [(one.name, one.arguments) for one in functions] == [("weather", '{"city": "Oslo 😀"}')] * 2
    again = request["messages"] + [
        choice.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls),
        {"role": "user", "content": "SAY:It rains."},
    ]
    answer = client.chat.completions.create(**request | {"messages": again})
    assert answer.choices[0].message.content == "It rains."


def test_the_asynchronous_client(server: RunningServer) -> None:
    """Oracle: the scripted answers; eight run at once, whole and streamed."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        request: dict[str, Any] = {"model": "demo", "input": f"SAY:{number}-{TEXT}"}
        if number % 2:
            return str((await client.responses.create(**request)).output_text)
        stream = await client.responses.create(**request, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="sesame", timeout=DEADLINE_S) as client:
            return list(await asyncio.gather(*(ask(client, number) for number in range(8))))

    assert asyncio.run(main()) == [f"{number}-{TEXT}" for number in range(8)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", None),
        ({"input": "x" * 2000}, openai.BadRequestError, None, "context_length_exceeded"),
        ({"input": []}, openai.BadRequestError, "input", None),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens", None),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id", None),
        ({"background": True}, openai.BadRequestError, "background", None),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            openai.BadRequestError,
            "tool_choice",
            None,
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, openai.BadRequestError, "text", None),
    ],
)
def test_refusals_are_the_clients_exceptions(
    client: openai.OpenAI,
    fields: Any,
    kind: type[openai.APIStatusError],
    param: str | None,
    code: str | None,
    stream: bool,
) -> None:
    """Oracle: the client's exception class for the status, with param and code; streams are refused at the start."""
    request: dict[str, Any] = {"model": "demo", "input": "x"} | fields
    with pytest.raises(kind) as error:
        client.responses.create(**request, stream=stream)
    assert error.value.code == code and error.value.request_id
    if param is not None:
        assert error.value.param == param


def test_the_other_exceptions(server: RunningServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the client's exception classes for 401, 404, 400 and 429 (more prompts than fit at all, or than fit
    now)."""
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.responses.create(model="demo", input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo", prompt=["x"] * 65)
    monkeypatch.setattr(server.engine, "step_delay_s", 0.02)
    with client.completions.create(model="demo", prompt="SAY:" + "x" * 450, max_tokens=450, stream=True) as held:
        next(iter(held))
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="demo", prompt=["x"] * 64)
    assert [model.id for model in client.models.list()] == ["demo", "alias"]
