"""OpenAI request bodies to prompts and sampling parameters, and sequences to response bodies."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tp_engine.api.openai.answer_shape import AnswerShape
from tp_engine.api.openai.errors import HttpError, describe_error
from tp_engine.api.openai.protocol import ChatBody, CompletionBody, parse_body
from tp_engine.api.openai.sampling import chat_params, completion_params, listed_prompts
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.requests.outputs import CompletionOutput, Logprob, RequestOutput
from tp_engine.requests.sampling_params import SamplingParams


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}))


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}))


def test_defaults_are_those_of_sampling_params() -> None:
    """Oracle: ``SamplingParams()``; a chat may fill the context."""
    assert completion_params(completion()) == SamplingParams()
    assert chat_params(chat()) == SamplingParams(max_tokens=None)
    assert completion_params(completion(temperature=None, max_tokens=None, stop=None)) == SamplingParams()


def test_model_defaults_yield_to_the_request() -> None:
    """Oracle: the order of precedence: request, model, library."""
    defaults = {"temperature": 0.6, "top_k": 20}
    params = chat_params(chat(top_k=5), defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 1.0)


EVERY_FIELD: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.2,
    "allowed_token_ids": [1, 2],
    "seed": -5,
    "stop": ["a", "b"],
    "stop_token_ids": [4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 30,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "cache_salt": "tenant",
}


def test_every_sampling_field_is_carried() -> None:
    """Oracle: the same values given to ``SamplingParams`` by hand."""
    body_fields = {**EVERY_FIELD, "logit_bias": {"5": 1.5, "6": -100}}
    by_hand = SamplingParams(**EVERY_FIELD, logit_bias={5: 1.5, 6: -100.0})
    assert completion_params(completion(**body_fields)) == by_hand
    assert chat_params(chat(**body_fields)) == by_hand


def test_logprobs_of_both_endpoints() -> None:
    """Oracle: the OpenAI reference: a number for completions, a flag and a number for chats."""
    assert completion_params(completion(logprobs=3)).logprobs == 3
    assert chat_params(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert chat_params(chat(logprobs=True)).logprobs == 0
    assert chat_params(chat(logprobs=False)).logprobs is None


def test_max_completion_tokens_is_the_newer_name() -> None:
    """Oracle: the OpenAI reference."""
    assert chat_params(chat(max_completion_tokens=5, max_tokens=9)).max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms(prompt: Any, prompts: list[Any]) -> None:
    """Oracle: the four forms of the OpenAI reference."""
    assert listed_prompts("prompt", completion(prompt=prompt).prompt) == prompts


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", ["temperature is 'hot'", "number"]),
        ({"temperature": -1}, "temperature", ["-1", "between 0"]),
        ({"n": 0}, "n", ["n is 0"]),
        ({"n": True}, "n", ["n is True"]),
        ({"max_tokens": "16.5"}, "max_tokens", ["'16.5'", "integer"]),
        ({"max_tokens": 0}, "max_tokens", ["max_tokens is 0"]),
        ({"prompt": []}, "prompt", ["empty list"]),
        ({"prompt": 3}, "prompt", ["prompt is 3", "or"]),
        ({"prompt": [1, "a"]}, "prompt", ["prompt"]),
        ({"logit_bias": {"a": 1}}, "logit_bias", ["'a'", "token ids"]),
        ({"stop": [""]}, "stop", ["non-empty"]),
        ({"suffix": "x"}, "suffix", ["not supported"]),
        ({"best_of": 4}, "best_of", ["best_of is 4"]),
        ({"cache_salt": ""}, "cache_salt", ["cache_salt"]),
        ({"priority": 2**40}, "priority", ["priority"]),
    ],
)
def test_completion_refusals(fields: dict[str, Any], param: str, words: list[str]) -> None:
    """Oracle: the parameter's name and the words of the message."""
    with pytest.raises(RequestError) as caught:
        body = completion(**fields)
        listed_prompts("prompt", body.prompt)
        completion_params(body)
    assert caught.value.param == param
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_chat_refusals(fields: dict[str, Any], param: str) -> None:
    """Oracle: the parameter's name."""
    with pytest.raises(RequestError) as caught:
        body = chat(**fields)
        chat_params(body)
    assert caught.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'{"prompt": "\\ud800"}', b"[" * 100_000, b"\xff\xfe"])
def test_bodies_that_are_no_request(raw: bytes) -> None:
    """Oracle: a ``RequestError``, and no other error."""
    with pytest.raises(RequestError):
        parse_body(CompletionBody, raw)


def test_unknown_fields_are_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one line for two requests."""
    monkeypatch.setattr(logging.getLogger("tp_engine"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="tp_engine"):
        completion(frobnicate=1)
        completion(frobnicate=2)
    assert [record.getMessage() for record in caplog.records] == ["ignoring the unknown request field 'frobnicate'"]


POSITIONS = [
    {5: Logprob(logprob=-0.5, rank=2, decoded_token="é"), 6: Logprob(logprob=-0.25, rank=1, decoded_token="x")},
    {7: Logprob(logprob=float("-inf"), rank=9, decoded_token="yz"), 6: Logprob(logprob=-0.1, rank=1)},
]


def output() -> RequestOutput:
    sequence = CompletionOutput(index=1, text="éyz", token_ids=[5, 7], finish_reason="stop", logprobs=POSITIONS)
    return RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=[1, 2, 3], outputs=[sequence], num_cached_tokens=2
    )


def test_completion_answer() -> None:
    """Oracle: the OpenAI reference, worked out by hand; minus infinity is written as -9999."""
    body = completion(logprobs=1, n=2, return_token_ids=True)
    answer = AnswerShape.of(body, "m").answer([output(), output()])
    assert answer["object"] == "text_completion" and answer["model"] == "m" and answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [1, 3]
    assert answer["choices"][0]["text"] == "éyz" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["token_ids"] == [5, 7] and answer["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["é", "yz"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"x": -0.25, "é": -0.5}, {"token_id:6": -0.1, "yz": -9999.0}],
        "text_offset": [0, 1],
    }
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    json.dumps(answer, allow_nan=False)


def test_chat_answer() -> None:
    """Oracle: the OpenAI reference, worked out by hand."""
    answer = AnswerShape.of(chat(logprobs=True, top_logprobs=1), "m").answer([output()])
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "éyz"}
    assert choice["logprobs"]["content"][0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "x", "logprob": -0.25, "bytes": [120]}],
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("too long", param="prompt", code="context_length_exceeded"), 400, "invalid_request_error"),
        (RequestError("no model", code="model_not_found"), 404, "not_found_error"),
        (HttpError(429, "full", retry_after_s=1), 429, "rate_limit_error"),
        (EngineDeadError("rank 1 died"), 500, "server_error"),
        (KeyError("secret inside"), 500, "server_error"),
    ],
)
def test_errors_have_one_shape(error: Exception, status: int, kind: str) -> None:
    """Oracle: the four keys of the OpenAI reference; an unforeseen error shows no internals."""
    got, body = describe_error(error)
    assert got == status
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == kind
    assert "secret" not in body["error"]["message"]


def test_an_error_does_not_repeat_megabytes() -> None:
    """By hand: of a message that has what a client sent, some thousand characters."""
    status, body = describe_error(RequestError("no " + "x" * 1_000_000))
    assert status == 400 and body["error"]["message"].startswith("no xxx") and len(body["error"]["message"]) < 5000
