"""langchain-openai against a running server: chats, streams, batches, structured output, completions, responses."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.frontend import DEADLINE_S, RunningServer, running_server
from tests.e2e.scripted import TEXT, City, scripted_engine
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(port=0, enable_auto_tool_choice=True, tool_call_parser="hermes")
    with running_server(scripted_engine(), config) as running:
        yield running


def chat(server: RunningServer, **options: Any) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    options = {"model": "demo", "timeout": DEADLINE_S, "max_retries": 0} | options
    return langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="none", **options)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_chats(server: RunningServer, use_responses_api: bool) -> None:
    """Oracle: the scripted answer, through either endpoint, whole, in a batch and in a stream."""
    model = chat(server, use_responses_api=use_responses_api)
    answer = model.invoke([("system", "Be brief."), ("human", f"SAY:{TEXT}")])
    assert answer.text == TEXT
    assert answer.usage_metadata["output_tokens"] == len(TEXT.encode()) + 1
    assert [one.text for one in model.batch([f"SAY:{word}" for word in "abc"])] == ["a", "b", "c"]
    chunks = list(model.stream(f"SAY:{TEXT}"))
    assert "".join(chunk.text for chunk in chunks) == TEXT and len(chunks) > 3


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_structured_output(server: RunningServer, use_responses_api: bool) -> None:
    """Oracle: the parsed object."""
    model = chat(server, use_responses_api=use_responses_api).with_structured_output(City, method="json_schema")
    assert model.invoke('SAY:{"name": "Oslo", "people": 7}') == City(name="Oslo", people=7)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_tools(server: RunningServer, use_responses_api: bool) -> None:
    """Oracle: the scripted call, whole and gathered from a stream."""

    def weather(city: str) -> str:
        """How the weather is."""
        return city

    model = chat(server, use_responses_api=use_responses_api).bind_tools([weather])
    said = 'SAY:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    whole = model.invoke(said)
    first, *rest = model.stream(said)
    streamed = functools.reduce(operator.add, rest, first)
    for answer in (whole, streamed):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Oslo"})]


def test_completions(server: RunningServer) -> None:
    """Oracle: the engine repeats a prompt without ``SAY:``."""
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.OpenAI(base_url=server.url + "/v1", api_key="none", model="demo", max_tokens=50)
    assert model.invoke(TEXT) == TEXT
    assert "".join(model.stream(TEXT)) == TEXT
