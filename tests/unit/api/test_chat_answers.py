"""Tool calls and reasoning through the whole server: an engine that says given texts, one byte per token."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.asgi import App, run_served
from tests.chat_templates import QWEN_LIKE
from tests.e2e.frontend import END_OF_TURN, INFO
from tests.fake_engine import FakeEngine
from tests.unit.api.test_reasoning import follows
from tp_engine.api.input_processor import load_tokenizer
from tp_engine.api.output_streams import MAX_WAITING
from tp_engine.config import DEMO_MODEL
from tp_engine.requests.request import EngineRequest
from tp_engine.server.config import ServerConfig

GOLDEN = Path(__file__).parents[2] / "golden"
CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time", "description": "the time"}},
]
QUESTION = {"role": "user", "content": "How is it in Köln?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>'
TEXT = f"<think>\nA tool.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('weather', 'time')}"
ARGUMENTS = '{"city": "Köln 😀"}'
CONFIG = ServerConfig(
    chat_template=QWEN_LIKE, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
)


def speaking(text: str) -> FakeEngine:
    """An engine that answers every prompt with ``text``, one token per byte, and ends its turn."""

    def reply(request: EngineRequest) -> Sequence[int]:
        return [*text.encode(), END_OF_TURN]

    return FakeEngine(reply, model_info=INFO)


def serve(engine: FakeEngine, scenario: Callable[[App], Awaitable[None]], config: ServerConfig = CONFIG) -> None:
    run_served(scenario, engine, load_tokenizer(str(DEMO_MODEL)), config)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [QUESTION], "tools": TOOLS, **fields}


def last_request(app: App) -> EngineRequest:
    engine = app.service.engine
    assert isinstance(engine, FakeEngine)
    return engine.added[-1]


def joined(chunks: Sequence[Any], index: int = 0) -> dict[str, Any]:
    """The deltas of one choice, joined as the OpenAI reference says."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"]) and call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


def whole(answer: Any, index: int = 0) -> dict[str, Any]:
    choice = answer["choices"][index]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }


def test_a_whole_answer() -> None:
    """Oracle: the OpenAI reference, by hand; reasoning tokens are the bytes up to the closing mark."""

    async def scenario(app: App) -> None:
        answer = (await app.post(CHAT, body())).json()
        choice = answer["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["role"], message["content"]) == ("assistant", "I look.")
        assert message["reasoning_content"] == message["reasoning"] == "A tool."
        assert [call["type"] for call in message["tool_calls"]] == ["function", "function"]
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "get_weather", "arguments": ARGUMENTS},
            {"name": "get_time", "arguments": ARGUMENTS},
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        details = answer["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len("<think>\nA tool.\n</think>")}
        prompt = bytes(id for id in last_request(app).prompt_token_ids if id < 256).decode()
        assert '<tools>\n{"type": "function", "function": {"name": "get_weather"' in prompt

    serve(speaking(TEXT), scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"max_tokens": 120},
        {"max_tokens": 30},
        {"max_tokens": 5},
        {"parallel_tool_calls": False},
        {"include_reasoning": False},
        {"tools": None},
        {"tool_choice": "none"},
        {"logprobs": True, "return_token_ids": True},
        {"stop": ["Köln"]},
    ],
    ids=str,
)
def test_streamed_equals_whole(fields: dict[str, Any]) -> None:
    """Oracle: the answer without a stream, with its counts; no markup in the visible text."""

    async def scenario(app: App) -> None:
        answer = (await app.post(CHAT, body(**fields))).json()
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = (await app.post(CHAT, body(**fields, **streaming))).events
        for index in range(fields.get("n", 1)):
            assert joined(chunks, index) == whole(answer, index)
        assert chunks[-1]["usage"] == answer["usage"]
        calls_wanted = fields.get("tools", TOOLS) and fields.get("tool_choice") != "none"
        assert not calls_wanted or "tool_call>" not in whole(answer)["content"]
        if fields.get("return_token_ids"):
            ids = [id for chunk in chunks for one in chunk["choices"] for id in one["token_ids"]]
            assert ids == answer["choices"][0]["token_ids"]
            parts = [one["logprobs"]["content"] for chunk in chunks for one in chunk["choices"] if one["logprobs"]]
            assert [entry for part in parts for entry in part] == answer["choices"][0]["logprobs"]["content"]

    serve(speaking(TEXT), scenario)


def test_finish_reasons_and_fewer_calls() -> None:
    """Oracle: ``length`` for an answer that a limit cut off; one call where only one was wanted; ``stop`` for a named
    one."""

    async def scenario(app: App) -> None:
        assert whole((await app.post(CHAT, body(max_tokens=110))).json())["finish_reason"] == "length"
        cut = whole((await app.post(CHAT, body(tool_choice="required", stop=['"name']))).json())
        assert (cut["content"].strip(), cut["calls"], cut["finish_reason"]) == ("I look.", [], "stop")  # no mark
        single = whole((await app.post(CHAT, body(parallel_tool_calls=False))).json())
        assert (single["calls"], single["finish_reason"]) == ([["get_weather", ARGUMENTS]], "tool_calls")

    serve(speaking(TEXT), scenario)


def test_a_message_that_a_stop_sequence_ends_within_a_call_calls_nothing() -> None:
    """Oracle: the reference: ``tool_use`` asks for the tool to be run, here it would be without its arguments, of which
    the block has what has come."""
    message = {"max_tokens": 500, "messages": [QUESTION], "tools": [{"name": "get_weather"}, {"name": "get_time"}]}

    async def scenario(app: App) -> None:
        for stop, reason, given in (
            (["😀"], "stop_sequence", {"INVALID_JSON": '{"city": "Köln '}),
            (["!"], "tool_use", {"city": "Köln 😀"}),
        ):
            answer = (await app.post("/v1/messages", message | {"stop_sequences": stop})).json()
            use = next(block for block in answer["content"] if block["type"] == "tool_use")
            assert (answer["stop_reason"], use["input"]) == (reason, given)

    serve(speaking(f"{CALL}!"), scenario)


def test_llama_calls() -> None:
    """Oracle: by hand."""

    async def scenario(app: App) -> None:
        answer = whole((await app.post(CHAT, body())).json())
        assert answer == {
            "content": "", "reasoning": "", "calls": [["get_weather", "{}"], ["get_time", "{}"]],
            "finish_reason": "tool_calls",
        }  # fmt: skip

    text = '{"name": "get_weather", "parameters": {}}; {"name": "get_time", "parameters": {}}'
    serve(speaking(text), scenario, ServerConfig(enable_auto_tool_choice=True, tool_call_parser="llama3_json"))


def forced_schema(app: App) -> Any:
    """The JSON schema that the engine must follow."""
    wanted = last_request(app).params.structured_outputs
    assert wanted is not None and isinstance(wanted.json, str)
    return json.loads(wanted.json)


def test_forced_calls() -> None:
    """Oracle: by hand; the engine gets the schema, and needs no parser of the model's own format."""

    async def required(app: App) -> None:
        expected = {"content": "", "reasoning": "", "calls": [["get_time", '{"a": 1}']], "finish_reason": "tool_calls"}
        assert whole((await app.post(CHAT, body(tool_choice="required"))).json()) == expected
        assert joined((await app.post(CHAT, body(tool_choice="required", stream=True))).events) == expected
        schema = forced_schema(app)
        names = [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]]
        assert (schema["type"], schema["minItems"], names) == ("array", 1, [["get_weather"], ["get_time"]])

    async def named(app: App) -> None:
        choice = {"type": "function", "function": {"name": "get_weather"}}
        expected = {"content": "", "reasoning": "", "calls": [["get_weather", ARGUMENTS]], "finish_reason": "stop"}
        assert whole((await app.post(CHAT, body(tool_choice=choice))).json()) == expected
        assert joined((await app.post(CHAT, body(tool_choice=choice, stream=True))).events) == expected
        assert forced_schema(app) == PARAMETERS

    serve(speaking('[{"name": "get_time", "parameters": {"a": 1}}]'), required, ServerConfig())
    serve(speaking(ARGUMENTS), named, ServerConfig())


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}], ids=str)
def test_a_forced_form_begins_behind_the_reasoning(fields: dict[str, Any]) -> None:
    """Oracle: the constraint that the engine gets, and the two parts of the answer."""

    async def scenario(app: App) -> None:
        answer = whole((await app.post(CHAT, body(**fields))).json())
        assert (answer["reasoning"], answer["content"]) == ("Hm.", "" if "tool_choice" in fields else "[]")
        constraint = last_request(app).params.structured_outputs
        last = "@answer" if "tool_choice" in fields else "(@answer | calls)"
        assert constraint is not None and str(constraint.preamble).startswith(f"start: thought space {last}\n")

    config = ServerConfig(chat_template=QWEN_LIKE, reasoning_parser="deepseek_r1", enable_auto_tool_choice=True,
                          tool_call_parser="hermes")  # fmt: skip
    text = f"Hm.</think>{CALL if 'tool_choice' in fields else '[]'}"
    serve(speaking(text), scenario, config)


SUM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "integer"}}}


@pytest.mark.parametrize("form", [{}, {"tool_choice": "required"}], ids=str)
@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>"])
def test_a_response_format_is_for_answers_and_leaves_calls_to_the_model(thought: str, form: dict[str, Any]) -> None:
    """Oracle: OpenAI's rule: the model calls, or answers in the format; with a forced call it calls.  Agents send the
    format of their last answer with each request."""

    async def scenario(app: App) -> None:
        answer = whole((await app.post(CHAT, body(response_format=SUM, **form))).json())
        assert (answer["calls"], answer["finish_reason"]) == ([["get_weather", ARGUMENTS]], "tool_calls")
        constraint = last_request(app).params.structured_outputs
        assert constraint is not None and follows(constraint, thought + CALL)
        assert follows(constraint, f"{thought}46") is (not form)
        assert not any(follows(constraint, thought + text) for text in ("I look.", "I look. " + CALL, "46" + CALL))

    serve(speaking(thought + CALL), scenario)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "tools", "--tool-call-parser"),
        ({"tool_choice": "auto"}, "tools", "--tool-call-parser"),
        ({"tool_choice": "sometimes"}, "tool_choice", "it must be none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among the tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        (
            {"tool_choice": "required", "structured_outputs": {"json_object": True}},
            "tool_choice",
            "structured_outputs another form",
        ),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice", "guided_regex another form"),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools[0] must be"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "1 to 256"),
        ({"messages": [QUESTION] * 2000, "tools": None}, "messages", "2000 messages"),
        ({"functions": [{"name": "f"}]}, "functions", "give tools"),
        ({"tools": None, "chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
        ({"tools": None, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "as a field"),
        (
            {"add_generation_prompt": True, "continue_final_message": True, "tools": []},
            "continue_final_message",
            "both",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], param: str, words: str) -> None:
    """Oracle: status 400, the field, and the words of the message."""

    async def scenario(app: App) -> None:
        reply = await app.post(CHAT, body(**fields))
        error = reply.json()["error"]
        assert (reply.status, error["param"]) == (400, param) and words in error["message"], error

    serve(speaking("x"), scenario, ServerConfig())


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    "off",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"reasoning_effort": "none"},
        {"messages": [QUESTION, {"role": "assistant", "content": "So: "}], "continue_final_message": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}, "tools": None},
        {"structured_outputs": {"choice": ["<think>", "no"]}},
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
    ],
    ids=str,
)
def test_a_form_holds_from_the_first_token_where_thinking_is_off(form: dict[str, Any], off: dict[str, Any]) -> None:
    """Oracle: no preamble; all of the text is the answer, also an opening mark."""
    text = CALL if "tool_choice" in form else "<think>"

    async def scenario(app: App) -> None:
        answer = whole((await app.post(CHAT, body(**form, **off))).json())
        assert answer["reasoning"] == "" and (answer["content"] == text or answer["calls"])
        constraint = last_request(app).params.structured_outputs
        assert constraint is not None and constraint.preamble is None

    serve(speaking(text), scenario)


def test_thinking_that_the_prompt_opens_or_closes() -> None:
    """Oracle: by hand; the template's own marks decide, not the text."""

    async def scenario(app: App) -> None:
        plain = body(tools=None)
        assert whole((await app.post(CHAT, plain)).json())["content"] == "four"
        off = whole((await app.post(CHAT, plain | {"chat_template_kwargs": {"enable_thinking": False}})).json())
        assert off["content"] == "two and two</think>four"

    config = ServerConfig(chat_template=QWEN_LIKE, reasoning_parser="deepseek_r1")
    serve(speaking("two and two</think>four"), scenario, config)


def test_continuing_and_repeating_a_message() -> None:
    """Oracle: the sent beginning plus the engine's text; the prompt ends with the beginning."""

    async def scenario(app: App) -> None:
        messages = [QUESTION, {"role": "assistant", "content": "It is "}]
        fields = {"tools": None, "messages": messages, "continue_final_message": True, "echo": True}
        assert whole((await app.post(CHAT, body(**fields))).json())["content"] == "It is warm."
        assert joined((await app.post(CHAT, body(**fields, stream=True))).events)["content"] == "It is warm."
        assert bytes(last_request(app).prompt_token_ids[-6:]).decode() == "It is "

    serve(speaking("warm."), scenario, ServerConfig())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tool_call", 'I <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'),
        ("reasoning", "<think>\nH m\n</think>\n\nYes."),
    ],
)
def test_golden_stream(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event of a stream, one token each. Oracle: tests/golden, reviewed by hand."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)

    async def scenario(app: App) -> None:
        reply = await app.post(CHAT, body(stream=True, stream_options={"include_usage": True}, request_id="golden"))
        expected = (GOLDEN / f"chat_{name}.sse").read_text(encoding="utf-8")
        assert reply.content.decode() == expected

    assert len(text) < MAX_WAITING, "more updates might be joined"
    serve(speaking(text), scenario)


def test_the_official_client_joins_the_stream() -> None:
    """Oracle: the client's own answer without a stream, except for the ids."""

    async def scenario(app: App) -> None:
        http_client: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app.app))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", max_retries=0, http_client=http_client
        ) as client:
            request: Any = {"model": "demo", "messages": [QUESTION], "tools": TOOLS}
            expected = (await client.chat.completions.create(**request)).choices[0]
            async with client.chat.completions.stream(**request) as stream:
                async for _ in stream:
                    pass
                choice = (await stream.get_final_completion()).choices[0]
            assert choice.finish_reason == expected.finish_reason == "tool_calls"
            assert choice.message.content == expected.message.content
            assert choice.message.model_extra == {"reasoning_content": "A tool.", "reasoning": "A tool."}
            calls, others = choice.message.tool_calls or [], expected.message.tool_calls or []
            assert [call.function.name for call in calls] == [call.function.name for call in others]
            assert [call.function.arguments for call in calls] == [ARGUMENTS, ARGUMENTS]
            # The answer is sent back with the tools' results, as every client does.
            results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in calls]
            again = request | {"messages": [QUESTION, choice.message.model_dump(), *results]}
            assert (await client.chat.completions.create(**again)).choices[0].message.tool_calls

    serve(speaking(TEXT), scenario)


@pytest.mark.parametrize("arguments", ['{"city": "K', "null", "[1]", '"x"', "", "hello"])
def test_bad_arguments_in_the_history_end_no_conversation(arguments: str) -> None:
    """Oracle: 200 from both endpoints, and the model's own text in the prompt."""

    async def scenario(app: App) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
        answer = await app.post(CHAT, body(messages=[QUESTION, said, result]))
        assert answer.status == 200, answer.content
        items = [
            QUESTION,
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ]
        answer = await app.post("/v1/responses", {"model": "demo", "input": items})
        assert answer.status == 200, answer.content
        prompt = bytes(id for id in last_request(app).prompt_token_ids if id < 256).decode()
        given = {} if arguments in ("", "null") else {"INVALID_JSON": arguments}
        written = json.dumps({"name": "get_weather", "arguments": given}, ensure_ascii=False)
        assert written in prompt

    serve(speaking("Sun."), scenario)
