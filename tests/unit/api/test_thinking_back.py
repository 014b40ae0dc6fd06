"""What the model thought comes back: signatures and seals, whole and streamed, and the next prompt after a call."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from tests import fake_engine
from tests.asgi import App, until
from tests.e2e.frontend import INFO
from tests.fake_engine import FakeEngine
from tests.unit.api.test_chat_answers import CALL, QUESTION, last_request, serve, speaking
from tp_engine.api.openai.reasoning_seal import ReasoningSeal

MESSAGES, RESPONSES, PLAN = "/v1/messages", "/v1/responses", "MY SECRET PLAN ü"
THOUGHT = f"<think>\n{PLAN}\n</think>\n\nI look.\n{CALL}"
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
MESSAGE: dict[str, Any] = {"max_tokens": 500, "messages": [QUESTION], "tools": [TOOL]}
SEALED = {"include": ["reasoning.encrypted_content"]}


def test_a_seal_opens_what_it_sealed_and_nothing_else() -> None:
    """Oracle: the text; every changed byte, another key and other texts are refused."""
    seal = ReasoningSeal("key")
    for text in ("", PLAN, "x" * 100_000, "half \ud800 a pair"):
        sealed = seal.sealed(text)
        assert ReasoningSeal("key").opened(sealed) == text.replace("\ud800", "?")
        assert ReasoningSeal("other").opened(sealed) is None and ReasoningSeal().opened(sealed) is None
    sealed = seal.sealed(PLAN)
    raw = base64.urlsafe_b64decode(sealed[5:])
    for place in range(len(raw)):
        changed = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        assert seal.opened("tpe1." + base64.urlsafe_b64encode(changed).decode()) is None
    for wrong in ("", "tpe1.", "tpe1.AAAA", "gAAAAABo_x", sealed[5:], sealed[:-4], "tpe1.ü", "tpe1.\ud800"):
        assert seal.opened(wrong) is None
    assert seal.signature(PLAN) == ReasoningSeal("key").signature(PLAN) != seal.signature(PLAN + " ")


def prompt(app: App) -> str:
    return bytes(one for one in last_request(app).prompt_token_ids if one < 256).decode()


def thinking_of(events: list[Any]) -> dict[str, str]:
    """The block of thinking that the events of a message make, with the signature before the block's end."""
    block: dict[str, str] = {}
    deltas = [one for one in events if one.get("index") == 0]
    assert deltas[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [one["type"] for one in deltas][-2:] == ["content_block_delta", "content_block_stop"]
    for one in deltas[1:-1]:
        delta = one["delta"]
        name = delta["type"].removesuffix("_delta")
        block[name] = block.get(name, "") + delta[name]
    assert deltas[-2]["delta"]["type"] == "signature_delta"
    return block


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_blocks_of_thinking_are_signed_and_read_back(display: str | None) -> None:
    """Oracle: Anthropic's form; the text of the model stands as reasoning in the prompt behind the tool's result."""

    async def scenario(app: App) -> None:
        body = MESSAGE | ({"thinking": {"type": "enabled", "display": display}} if display else {})
        whole = (await app.post(MESSAGES, body)).json()
        block = whole["content"][0]
        streamed = thinking_of((await app.post(MESSAGES, body | {"stream": True})).events)
        assert block == {"type": "thinking", "thinking": "", **streamed} and block["signature"]
        assert block["thinking"] == ("" if display == "omitted" else PLAN)
        assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > len(PLAN)
        result = {"type": "tool_result", "tool_use_id": whole["content"][2]["id"], "content": "sun"}
        for blocks, is_seen in (
            (whole["content"], True),
            ([{**block, "signature": "EqQBCkgIAhAB"}, *whole["content"][1:]], display != "omitted"),
            ([{"type": "redacted_thinking", "data": block["signature"]}, *whole["content"][1:]], display == "omitted"),
            ([{"type": "redacted_thinking", "data": "EqQBCkgIAhAB"}, *whole["content"][1:]], False),
        ):
            turns = [QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            assert (await app.post(MESSAGES, body | {"messages": turns})).status == 200
            assert (f"<think>\n{PLAN}</think>" in prompt(app)) == is_seen
            counted = await app.post(f"{MESSAGES}/count_tokens", {"messages": turns, "tools": [TOOL]})
            assert counted.status == 200

    serve(speaking(THOUGHT), scenario)


def item_of(response: Any) -> Any:
    (item,) = [one for one in response["output"] if one["type"] == "reasoning"]
    return item


def test_sealed_reasoning_is_given_when_asked_and_read_back() -> None:
    """Oracle: OpenAI's reference: ``include`` asks for it; the item works alone, without its id and content."""

    async def scenario(app: App) -> None:
        body = {"input": "hi", "tools": [FUNCTION]}
        assert item_of((await app.post(RESPONSES, body)).json())["encrypted_content"] is None
        whole = (await app.post(RESPONSES, body | SEALED)).json()
        item = item_of(whole)
        assert item["content"][0]["text"] == PLAN and item["summary"] == []
        events = (await app.post(RESPONSES, body | SEALED | {"stream": True})).events
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert done[0]["encrypted_content"] == item_of(events[-1]["response"])["encrypted_content"]
        assert done[0]["encrypted_content"] == item["encrypted_content"]
        calls = [one for one in whole["output"] if one["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "sun"} for one in calls]
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
        others = {"summary": [{"type": "summary_text", "text": "short"}]}
        for sent in (item, sealed, sealed | others, {**item, "encrypted_content": "of another server"}):
            turns = [{"role": "user", "content": "hi"}, sent, *whole["output"][1:], *results]
            assert (await app.post(RESPONSES, body | {"input": turns})).status == 200
            assert f"<think>\n{PLAN}</think>" in prompt(app)

    serve(speaking(THOUGHT), scenario)


@pytest.mark.parametrize("change", ["another", "cut", "text"])
def test_a_wrong_seal_is_refused_by_its_place(change: str) -> None:
    """Oracle: OpenAI's code; what this server did not write is never read as its model's thinking."""

    async def scenario(app: App) -> None:
        sealed = item_of((await app.post(RESPONSES, {"input": "hi"} | SEALED)).json())["encrypted_content"]
        wrong = {"another": ReasoningSeal("x").sealed("evil"), "cut": sealed[:-4], "text": "gAAAAABo"}[change]
        turns = [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": [], "encrypted_content": wrong}]
        refused = await app.post(RESPONSES, {"input": turns})
        error = refused.json()["error"]
        assert (refused.status, error["param"], error["code"]) == (400, "input", "invalid_encrypted_content")
        assert "input[1].encrypted_content" in error["message"]
        summary = [{"type": "summary_text", "text": "told in short"}]  # goes on after a restart of the server
        assert (await app.post(RESPONSES, {"input": [turns[0], turns[1] | {"summary": summary}]})).status == 200
        assert "told in short" in prompt(app) and "evil" not in prompt(app)

    serve(speaking(THOUGHT), scenario)


def test_reasoning_as_a_summary_where_one_is_asked_for() -> None:
    """Oracle: OpenAI's events of summaries; clients that show summaries alone show the reasoning."""

    async def scenario(app: App) -> None:
        body = {"input": "hi", "reasoning": {"summary": "auto"}}
        response = (await app.post(RESPONSES, body)).json()
        assert item_of(response)["summary"] == [{"type": "summary_text", "text": PLAN}]
        assert response["reasoning"]["summary"] == "auto"
        events = [
            one
            for one in (await app.post(RESPONSES, body | {"stream": True})).events
            if one["type"].startswith("response.reasoning_summary_")
        ]
        kinds = [one["type"].removeprefix("response.reasoning_summary_") for one in events]
        assert kinds == ["part.added", *["text.delta"] * (len(kinds) - 3), "text.done", "part.done"]
        assert {one["summary_index"] for one in events} == {0}
        assert "".join(one["delta"] for one in events[1:-2]) == events[-2]["text"] == events[-1]["part"]["text"] == PLAN

    serve(speaking(THOUGHT), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_message_says_so(stream: bool) -> None:
    """Oracle: no stop reason, as vLLM gives none; a stream ends with an error, which every client sees."""
    engine = FakeEngine(lambda request: [*b"abc"] * 900, step_delay_s=0.002, model_info=INFO)

    async def scenario(app: App) -> None:
        running = app.start("POST", MESSAGES, {"max_tokens": 900, "messages": [QUESTION], "stream": stream})
        await until(lambda: engine.num_steps > 5, "some tokens")
        assert (await app.post("/abort", {"abort_all": True})).status == 200
        reply = await running.reply()
        if not stream:
            message = reply.json()
            assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
            assert message["content"][0]["text"].startswith("abc")
            return
        *_, ending, last = reply.events
        assert ending["type"] == "message_delta" and ending["delta"]["stop_reason"] is None
        assert last["type"] == "error" and "aborted" in last["error"]["message"]

    serve(engine, scenario)


def test_the_start_of_a_message_counts_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the counts of its end, but for the tokens of the answer: clients that read the start alone see them."""
    next_delta = fake_engine._Sequence.next_delta

    def cached(sequence: Any, now_s: float) -> Any:
        return msgspec.structs.replace(next_delta(sequence, now_s), num_cached_tokens=7)

    monkeypatch.setattr(fake_engine._Sequence, "next_delta", cached)

    async def scenario(app: App) -> None:
        events = (await app.post(MESSAGES, MESSAGE | {"stream": True})).events
        start = events[0]["message"]["usage"]
        (end,) = [one["usage"] for one in events if one["type"] == "message_delta"]
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert [start[name] for name in names] == [end[name] for name in names]
        assert start["cache_read_input_tokens"] == 7

    serve(speaking(THOUGHT), scenario)
