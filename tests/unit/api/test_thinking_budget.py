"""Budgets of thinking: a grammar of token ids closes the reasoning, whatever the model would write."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from tests.asgi import App, run_served
from tests.chat_templates import QWEN_LIKE
from tests.fake_engine import FakeEngine, says
from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.api.test_chat_answers import QUESTION, last_request, serve, speaking
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.reasoning import REASONING_FORMATS, Beginning, ReasoningFormat
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.grammar.library import new_matcher
from tp_engine.grammar.vocabulary import make_vocabulary
from tp_engine.requests.structured_outputs import StructuredOutputsParams
from tp_engine.server.config import ServerConfig

BUDGET = 5
QWEN = REASONING_FORMATS["qwen3"]


@cache
def thinking_tokenizer() -> Any:
    """A tokenizer whose marks are one token each, and not special, as those of Qwen3 and DeepSeek."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_tokens(
        [AddedToken(mark, special=False) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return tokenizer


def allowed(matcher: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")))


def walk(params: StructuredOutputsParams, text: str) -> tuple[int, set[int]]:
    """How many tokens of ``text`` the constraint takes, and what it allows behind them."""
    tokenizer = thinking_tokenizer()
    vocabulary = make_vocabulary(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [1])
    matcher, _ = new_matcher(params, vocabulary.tokens)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for place, token_id in enumerate(token_ids):
        if token_id not in allowed(matcher):
            return place, allowed(matcher)
        matcher.consume_token(token_id)
    return len(token_ids), allowed(matcher)


def limited(begins: Beginning) -> StructuredOutputsParams:
    grammar = QWEN.limited(TokenWriting.of(thinking_tokenizer()), begins, BUDGET)
    assert grammar is not None
    return StructuredOutputsParams(grammar=grammar)


def test_a_budget_closes_the_reasoning_and_leaves_the_answer_free() -> None:
    """Oracle: by hand: after five tokens only the closing mark may come, and after it everything, an end too."""
    writing = TokenWriting.of(thinking_tokenizer())
    opens, closes = (writing.token_id(mark) for mark in ("<think>", "</think>"))
    every = set(range(len(thinking_tokenizer())))
    for begins, start in ((Beginning.REASONING, ""), (Beginning.EITHER, "<think>")):
        assert walk(limited(begins), f"{start}01234567") == (5 + bool(start), {closes})
        for text in ("01234</think>answer", "0</think>a <tool_call> b </think> c <think> 0123456789", "</think>"):
            num_taken, behind = walk(limited(begins), start + text)
            assert num_taken == len(thinking_tokenizer().encode(start + text, add_special_tokens=False))
            assert behind >= every
    num_taken, behind = walk(limited(Beginning.EITHER), "an answer <think> of 0123456789")
    assert num_taken > 20 and behind >= every
    assert walk(limited(Beginning.EITHER), "")[1] >= every and opens in every
    assert QWEN.limited(writing, Beginning.ANSWER, BUDGET) is None


def test_a_budget_holds_before_structured_output() -> None:
    """Oracle: by hand: the same, and then nothing but the form that is asked for."""
    writing = TokenWriting.of(thinking_tokenizer())
    for begins, start in ((Beginning.REASONING, ""), (Beginning.EITHER, "<think>")):
        preamble = QWEN.preamble(writing, begins, BUDGET)
        params = StructuredOutputsParams(choice=("yes", "no"), preamble=preamble)
        assert walk(params, f"{start}012345")[1] == {writing.token_id("</think>")}
        assert walk(params, f"{start}01</think>\nyes")[0] == len(thinking_tokenizer().encode(f"{start}01</think>\nyes"))
        assert walk(params, f"{start}01</think>\nmaybe")[0] < len(
            thinking_tokenizer().encode(f"{start}01</think>\nmay")
        )


def num_refused(params: StructuredOutputsParams, text: str) -> int:
    return len(thinking_tokenizer().encode(text, add_special_tokens=False)) - walk(params, text)[0]


def test_reasoning_without_a_budget_ends_with_the_models_own_token() -> None:
    """Oracle: the tokens that the tokenizer itself makes: a mark in angle brackets is one, special or not."""
    for begins, start in ((Beginning.REASONING, ""), (Beginning.EITHER, "<think>")):
        preamble = QWEN.preamble(TokenWriting.of(thinking_tokenizer()), begins)
        params = StructuredOutputsParams(choice=("yes", "no"), preamble=preamble)
        assert num_refused(params, f"{start}a long thought of 0123456789</think>\n\nyes") == 0
        assert num_refused(params, f"{start}a</think>maybe") == 5


@pytest.mark.parametrize("fields", [{}, {"thinking_token_budget": 3}])
def test_a_forced_call_has_the_models_own_tokens(fields: dict[str, Any]) -> None:
    """Oracle: the tokens of a call as the tokenizer makes them, behind reasoning or not."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    engine = FakeEngine(says([5]))

    async def scenario(app: App) -> None:
        body = {"messages": [QUESTION], "tools": [tool], "tool_choice": "required", "max_tokens": 50, **fields}
        reply = await app.post("/v1/chat/completions", body)
        assert reply.status == 200, reply.json()
        params = engine.added[-1].params.structured_outputs
        assert params is not None
        for start in ("", "<think>a</think>\n"):
            assert num_refused(params, f'{start}<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>') == 0
        if fields:
            assert num_refused(params, "<think>0123") == 1

    config = ServerConfig(chat_template=QWEN_LIKE, tool_call_parser="hermes", reasoning_parser="qwen3")
    run_served(scenario, engine, thinking_tokenizer(), config)


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_which_formats_can_be_limited(name: str) -> None:
    """Oracle: by hand: those with one closing mark, where both marks are one token of the vocabulary."""
    reasoning: ReasoningFormat = REASONING_FORMATS[name]
    can = reasoning.opens == ("<think>",) and len(reasoning.closes) == 1
    assert reasoning.limits(TokenWriting.of(thinking_tokenizer())) == can
    assert not reasoning.limits(TokenWriting.of(byte_level_tokenizer())) and not reasoning.limits(TokenWriting.of(None))


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": 7, "thinking_budget": 9}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, 8),
        ({"reasoning": {"max_tokens": 9}}, 9),
        ({"thinking_budget": 10}, 10),
        ({"thinking_budget": -1, "thinking_token_budget": -1}, None),
        ({"thinking_budget": 0}, None),
    ],
)
def test_every_name_of_a_budget(fields: dict[str, Any], budget: int | None) -> None:
    """Oracle: vLLM's name, Anthropic's, OpenRouter's and DashScope's."""
    assert ChatBody.model_validate({"messages": [QUESTION], **fields}).budget == budget


def test_a_budget_that_can_not_be_kept_is_refused_or_told() -> None:
    """Oracle: vLLM's field is refused by its name; others, which are no limits to count on, leave a line in the log.
    The marks of the demo model are several tokens."""

    async def scenario(app: App) -> None:
        chat = {"messages": [QUESTION], "max_tokens": 50}
        refused = await app.post("/v1/chat/completions", chat | {"thinking_token_budget": 9})
        error = refused.json()["error"]
        assert (refused.status, error["param"]) == (400, "thinking_token_budget") and "one token" in error["message"]
        bodies = ({"thinking_budget": 9}, {"reasoning": {"max_tokens": 9}}, {"thinking_token_budget": 50})
        for body in (*bodies, {"thinking": {"type": "enabled", "budget_tokens": 9}}):
            assert (await app.post("/v1/chat/completions", chat | body)).status == 200
            assert last_request(app).params.structured_outputs is None
        beams = await app.post("/v1/chat/completions", chat | {"use_beam_search": True, "n": 2, "thinking_budget": 9})
        assert beams.status == 400

    serve(speaking("x"), scenario)
