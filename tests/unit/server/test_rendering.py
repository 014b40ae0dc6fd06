"""Routes that tell of prompts without running them, and several conversations in one body."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import App
from tests.fake_engine import FakeEngine
from tests.tiny_server import chat_tokenizer
from tests.unit.server.test_server_api import MESSAGES, error_of, ids, serve
from tp_engine.server.config import ServerConfig


def test_what_the_engine_would_get() -> None:
    """Oracle: the request that the engine gets of the same body; the text is that of the token ids."""

    async def scenario(app: App) -> None:
        engine = app.service.engine
        assert isinstance(engine, FakeEngine)
        body = {"messages": MESSAGES, "max_tokens": 7, "temperature": 0.5, "cache_salt": "s", "priority": 3}
        chat = (await app.post("/v1/chat/completions/render", body)).json()
        assert not engine.added
        await app.post("/v1/chat/completions", body)
        request = engine.added[-1]
        assert chat["token_ids"] == request.prompt_token_ids
        assert chat["prompt_text"] == chat_tokenizer().decode(request.prompt_token_ids)
        assert chat["sampling_params"].items() >= {"max_tokens": 7, "temperature": 0.5}.items()
        assert "top_p" not in chat["sampling_params"]
        assert (chat["cache_salt"], chat["priority"], chat["stream"], chat["features"]) == ("s", 3, False, None)
        schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
        formed = (await app.post("/v1/chat/completions/render", body | {"response_format": schema})).json()
        assert formed["sampling_params"]["structured_outputs"]["json"] == '{"type":"integer"}'
        both = (await app.post("/v1/completions/render", {"prompt": ["a", "hello"], "max_tokens": 2})).json()
        assert [one["token_ids"] for one in both] == [ids("a"), ids("hello")]
        assert len({one["request_id"] for one in both}) == 2
        for path, wrong, param in (
            ("/v1/chat/completions/render", body | {"temperature": -1}, "temperature"),
            ("/v1/chat/completions/render", body | {"use_beam_search": True}, "use_beam_search"),
            ("/v1/completions/render", {"prompt": [5, 100000]}, "prompt"),
            ("/v1/completions/render", {"prompt": "a", "model": "other"}, "model"),
        ):
            assert error_of(await app.post(path, wrong))["param"] == param

    serve(scenario)


def test_the_length_of_a_response_s_prompt() -> None:
    """Oracle: the usage of the response to the same body."""

    async def scenario(app: App) -> None:
        tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
        body: dict[str, Any] = {"input": "hi there", "instructions": "be kind", "tools": [tool]}
        counted = (await app.post("/v1/responses/input_tokens", body)).json()
        assert counted["object"] == "response.input_tokens"
        answer = (await app.post("/v1/responses", body | {"max_output_tokens": 2})).json()
        assert counted["input_tokens"] == answer["usage"]["input_tokens"] > len("be kind")
        for wrong, param in (
            ({"input": []}, "input"),
            ({"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ):
            assert error_of(await app.post("/v1/responses/input_tokens", wrong))["param"] == param
        assert (await app.get("/v1/responses/input_tokens")).status == 404

    serve(scenario, config=ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes"))


def test_the_tokenizer_is_described() -> None:
    """Oracle: the tokenizer; nothing tells where its files are."""

    async def scenario(app: App) -> None:
        found = (await app.get("/tokenizer_info")).json()
        tokenizer = chat_tokenizer()
        assert found["tokenizer_class"] == type(tokenizer).__name__
        assert found["chat_template"] == tokenizer.chat_template
        assert not any(name.endswith(("_file", "name_or_path")) for name in found)

    serve(scenario)


def test_several_conversations_in_one_body() -> None:
    """Oracle: the answers to each conversation alone, in order, and the sum of their usage; vLLM's endpoint."""

    async def scenario(app: App) -> None:
        conversations = [MESSAGES, [{"role": "user", "content": "another one"}], MESSAGES]
        options = {"max_tokens": 5, "temperature": 0.0}
        alone = [(await app.post("/v1/chat/completions", {"messages": one, **options})).json() for one in conversations]
        batch = (await app.post("/v1/chat/completions/batch", {"messages": conversations, **options})).json()
        assert batch["object"] == "chat.completion" and [one["index"] for one in batch["choices"]] == [0, 1, 2]
        for choice, one in zip(batch["choices"], alone, strict=True):
            assert choice["message"] == one["choices"][0]["message"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert batch["usage"][name] == sum(one["usage"][name] for one in alone)
        two = (await app.post("/v1/chat/completions/batch", {"messages": conversations, "n": 2, **options})).json()
        assert [one["index"] for one in two["choices"]] == [*range(6)]

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": MESSAGES}, "messages"),
        ({"messages": [MESSAGES, [{"role": "user"}]]}, "messages[1]"),
        ({"messages": [MESSAGES], "stream": True}, "stream"),
        ({"messages": [MESSAGES], "tools": [{}]}, "tools"),
        ({"messages": [MESSAGES], "use_beam_search": True}, "use_beam_search"),
        ({"messages": [MESSAGES], "temperature": -1}, "temperature"),
        ({"messages": [MESSAGES] * 2000}, "messages"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_conversations_that_can_not_be_answered_together(body: dict[str, Any], param: str) -> None:
    """Oracle: the field, and the conversation."""

    async def scenario(app: App) -> None:
        reply = await app.post("/v1/chat/completions/batch", body)
        assert reply.status in (400, 429) and error_of(reply)["param"] == param, reply.content

    serve(scenario)
