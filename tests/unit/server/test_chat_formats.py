"""The formats of the models with experts through the whole server: an engine that says given texts, one token per
byte."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.asgi import App
from tests.chat_templates import QWEN_LIKE
from tests.unit.api.test_calls_in_reasoning import CALLS
from tests.unit.api.test_chat_answers import (
    ARGUMENTS,
    CHAT,
    QUESTION,
    TOOLS,
    body,
    joined,
    last_request,
    serve,
    speaking,
)
from tests.unit.api.test_chat_answers import whole as message_of
from tests.unit.api.test_chosen_formats import TEMPLATES
from tests.unit.api.test_reasoning import follows
from tp_engine.api.openai.reasoning import REASONING_ALIASES, REASONING_FORMATS
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.server.config import ServerConfig

CITY = "Köln 😀"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def config(tools: str | None, reasoning: str | None) -> ServerConfig:
    return ServerConfig(
        chat_template=QWEN_LIKE,
        tool_call_parser=tools or "none",
        reasoning_parser=reasoning or "none",
    )


THOUGHT = "<|channel|>analysis<|message|>A tool.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
HARMONY = f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}"

# the two parsers, and a text with a thought, a content and a call
TEXTS = {
    ("openai", "openai_gptoss"): HARMONY,
    ("glm45", "glm45"): f"\n<think>A tool.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
    f"<arg_value>{CITY}</arg_value>\n</tool_call>",
    ("minimax_m2", "minimax_m2"): 'A tool.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
    f'<parameter name="city">{CITY}</parameter>\n</invoke>\n</minimax:tool_call>',
    ("qwen3_coder", "qwen3"): "<think>\nA tool.\n</think>\n\nI look.\n<tool_call>\n<function=get_weather>\n"
    f"<parameter=city>\n{CITY}\n</parameter>\n</function>\n</tool_call>",
    ("mistral", "mistral"): f"[THINK]A tool.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    ("granite", "granite"): "Here is my thought process: A tool.\nHere's my response: I look.\n<|tool_call|>"
    f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    ("ernie45", "ernie45"): "A tool.\n</think>\n\n<response>\nI look.\n</response>\n\n<tool_call>\n"
    f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n',
}


def expected(calls: bool = True, reasoning: bool = True) -> dict[str, Any]:
    return {
        "content": "I look.",
        "reasoning": "A tool." if reasoning else "",
        "calls": [["get_weather", ARGUMENTS]] if calls else [],
        "finish_reason": "tool_calls" if calls else "stop",
    }


@pytest.mark.parametrize(("parsers", "text"), TEXTS.items(), ids=str)
def test_chats(parsers: tuple[str, str], text: str) -> None:
    """Whole and streamed. Oracle: by hand."""

    async def scenario(app: App) -> None:
        answer = (await app.post(CHAT, body())).json()
        assert message_of(answer) == expected()
        chunks = (await app.post(CHAT, body(stream=True, stream_options={"include_usage": True}))).events
        assert joined(chunks) == expected() and chunks[-1]["usage"] == answer["usage"]
        assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < len(text) - len(ARGUMENTS)

    serve(speaking(text), scenario, config(*parsers))


@pytest.mark.parametrize(("parsers", "text"), TEXTS.items(), ids=str)
def test_responses(parsers: tuple[str, str], text: str) -> None:
    """``/v1/responses``, whole and streamed. Oracle: by hand."""

    async def scenario(app: App) -> None:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
        request = {"model": "demo", "input": "How is it?", "tools": tools}
        items = (await app.post("/v1/responses", request)).json()["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        assert [item["content"][0]["text"] for item in items[:2]] == ["A tool.", "I look."]
        assert (items[2]["name"], items[2]["arguments"]) == ("get_weather", ARGUMENTS)
        events = (await app.post("/v1/responses", request | {"stream": True})).events
        assert [item["type"] for item in events[-1]["response"]["output"]] == [item["type"] for item in items]

    serve(speaking(text), scenario, config(*parsers))


# The formats of calls and of reasoning that one model has: those that a template chooses, and further ones.
PAIRS = {(tools, reasoning) for _, tools, reasoning in TEMPLATES.values() if tools and reasoning}
PAIRS |= {(name.partition(",")[0], REASONING_ALIASES.get(one, one)) for name, (one, _) in CALLS.items()}


@pytest.mark.parametrize("parsers", sorted(PAIRS), ids=str)
def test_a_forced_call_behind_reasoning(parsers: tuple[str, str]) -> None:
    """Oracle: by hand: the reasoning, then the call in the model's own form, whole and streamed; the grammar takes that
    text, and none with a content, without a call, or with a call in JSON."""
    calls, reasoning = TOOL_FORMATS[parsers[0]], REASONING_FORMATS[parsers[1]]
    thought = f"{reasoning.opens[0]}A tool.{reasoning.closes[0]}" if reasoning.message is None else THOUGHT
    call = calls.written([("get_weather", {"city": CITY})]) if calls.message is None else CALL.removesuffix("<|call|>")

    async def scenario(app: App) -> None:
        for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
            request = body(tool_choice=choice)
            found = expected() | {"content": "", "finish_reason": reason}
            assert message_of((await app.post(CHAT, request)).json()) == found
            assert joined((await app.post(CHAT, request | {"stream": True})).events) == found
            constraint = last_request(app).params.structured_outputs
            assert constraint is not None
            for text, fits in (
                (thought + call, True),
                (call, not reasoning.always),
                (thought, False),
                (f"{thought}I look.{call}", False),
                (f"{thought}{ARGUMENTS}", False),
                (f'{thought}[{{"name": "get_weather", "parameters": {ARGUMENTS}}}]', False),
            ):
                assert follows(constraint, text) is fits, text

    serve(speaking(thought + call), scenario, config(*parsers))


@pytest.mark.parametrize("text", [THOUGHT + CALL, CALL, CALL.removesuffix("<|call|>")])
def test_a_forced_call_of_gpt_oss(text: str) -> None:
    """The official client, whole and streamed. Oracle: by hand; the grammar fits the format that the model knows."""

    async def scenario(app: App) -> None:
        http_client: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app.app))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", max_retries=0, http_client=http_client
        ) as client:
            request: Any = {"model": "demo", "messages": [QUESTION], "tools": TOOLS, "tool_choice": NAMED}
            answer = (await client.chat.completions.create(**request)).choices[0]
            async with client.chat.completions.stream(**request) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
        for choice in (answer, streamed):
            assert choice.finish_reason == "stop" and not choice.message.content
            functions = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
            assert [(one.name, one.arguments) for one in functions] == [("get_weather", ARGUMENTS)]
        constraint = last_request(app).params.structured_outputs
        assert constraint is not None and constraint.grammar is not None and constraint.json is None
        assert "commentary to=functions." in constraint.grammar and "get_time" not in constraint.grammar

    for parsers in (("openai", "openai_gptoss"), ("openai", None), (None, "openai_gptoss")):
        serve(speaking(text), scenario, config(*parsers))


def test_either_flag_of_gpt_oss_alone() -> None:
    """Oracle: by hand: no markup, reasoning only on request, and only the calls that are wanted."""

    async def only_tools(app: App) -> None:
        assert message_of((await app.post(CHAT, body())).json()) == expected(reasoning=False)
        assert joined((await app.post(CHAT, body(stream=True))).events) == expected(reasoning=False)
        assert message_of((await app.post(CHAT, body(tools=None))).json()) == expected(calls=False, reasoning=False)

    async def only_reasoning(app: App) -> None:
        found = message_of((await app.post(CHAT, body(tools=None))).json())
        assert found == expected(calls=False) | {"reasoning": f"A tool.\n\n{ARGUMENTS}"}

    serve(speaking(HARMONY), only_tools, config("openai", None))
    serve(speaking(HARMONY), only_reasoning, config(None, "openai_gptoss"))


def test_an_object_that_gpt_oss_must_write() -> None:
    """Oracle: the constraint that the engine gets, and the answer."""

    async def scenario(app: App) -> None:
        fields = {"tools": None, "response_format": {"type": "json_object"}}
        found = message_of((await app.post(CHAT, body(**fields))).json())
        assert (found["reasoning"], found["content"]) == ("A tool.", "{}")
        constraint = last_request(app).params.structured_outputs
        assert constraint is not None and constraint.json_object and '"final"' in str(constraint.preamble)

    serve(speaking(THOUGHT + "<|channel|>final<|message|>{}"), scenario, config("openai", "openai_gptoss"))
