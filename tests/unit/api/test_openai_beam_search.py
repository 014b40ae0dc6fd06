"""OpenAI bodies with ``use_beam_search``: the resulting parameters, and the errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_engine import MODEL_INFO
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.protocol import ChatBody, CompletionBody, parse_body
from tp_engine.api.openai.requests import prepare
from tp_engine.api.openai.sampling import beam_search_params
from tp_engine.errors import RequestError
from tp_engine.requests.sampling_params import BeamSearchParams

CONTEXT = 1024


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x", "use_beam_search": True, **fields}))


def chat(**fields: Any) -> ChatBody:
    messages = [{"role": "user", "content": "hi"}]
    return parse_body(ChatBody, json.dumps({"messages": messages, "use_beam_search": True, **fields}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"beam_width": 1}),
        ({"n": 3}, {"beam_width": 3}),
        ({"n": 2, "best_of": 5}, {"beam_width": 5}),
        ({"best_of": 4}, {"beam_width": 4}),
        ({"n": 2, "temperature": 0.7, "top_p": 0.5, "seed": 1}, {"beam_width": 2, "temperature": 0.7}),
        ({"n": 2, "stop": [], "repetition_penalty": 1.0, "logit_bias": {}}, {"beam_width": 2}),
        (
            {"n": 2, "length_penalty": 0.5, "ignore_eos": True, "include_stop_str_in_output": True},
            {"beam_width": 2, "length_penalty": 0.5, "ignore_eos": True, "include_stop_str_in_output": True},
        ),
    ],
    ids=str,
)
def test_fields_of_a_completion(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Oracle: the parameters by hand: the width is best_of, or n; 16 tokens by default."""
    assert beam_search_params(completion(**fields), CONTEXT) == BeamSearchParams(max_tokens=16, **expected)
    assert beam_search_params(completion(max_tokens=5, **fields), CONTEXT).max_tokens == 5


def test_a_chat_may_fill_the_context() -> None:
    """Oracle: the same as without beams."""
    assert beam_search_params(chat(n=2), CONTEXT) == BeamSearchParams(beam_width=2, max_tokens=CONTEXT)
    assert beam_search_params(chat(max_completion_tokens=5, max_tokens=9), CONTEXT).max_tokens == 5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"stop": "x"}, "stop"),
    ({"stop": ["x"]}, "stop"),
    ({"stop_token_ids": [3]}, "stop_token_ids"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias"),
    ({"allowed_token_ids": [3]}, "allowed_token_ids"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"n": 0}, "n"),
    ({"n": 257}, "beam_width"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"length_penalty": 50.0}, "length_penalty"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    """Oracle: the parameter's name, for completions and chats alike."""
    for body in (completion(**fields), chat(**fields)):
        with pytest.raises(RequestError) as caught:
            beam_search_params(body, CONTEXT)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (completion(n=3, best_of=2), "n"),
        (completion(suffix="x"), "suffix"),
        (completion(echo=True, logprobs=1), "echo"),
        (completion(logprobs=21), "logprobs"),
        (completion(prompt=[5000]), "prompt"),
        (chat(tools=[{"type": "function"}]), "tools"),
        (chat(top_logprobs=3), "top_logprobs"),
    ],
    ids=str,
)
def test_refusals_of_whole_bodies(body: CompletionBody | ChatBody, param: str) -> None:
    """Oracle: the parameter's name; the user's limit on logprobs holds, although the search itself needs more."""
    processor = InputProcessor(MODEL_INFO, byte_level_tokenizer())
    with pytest.raises(RequestError) as caught:
        prepare(body, processor, "demo")
    assert caught.value.param == param


def test_one_search_per_prompt() -> None:
    """Oracle: the prompts; a salt and a priority reach every request of the search."""
    processor = InputProcessor(MODEL_INFO, byte_level_tokenizer())
    body = completion(prompt=[[1, 2], [3]], n=30, cache_salt="tenant", priority=-3, echo=True)
    prepared = prepare(body, processor, "demo")
    requests = [request for search in prepared.searches for request in search.next_requests()]
    assert [request.prompt_token_ids for request in requests] == [[1, 2], [3]]
    assert {(one.params.cache_salt, one.priority, one.params.logprobs) for one in requests} == {("tenant", -3, 60)}
    assert prepared.echoes is not None and len(prepared.echoes) == 2 and prepared.shape.num_per_prompt == 30
