"""Beam search through the HTTP server, with an engine of known candidates."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.frontend import END_OF_TURN, RunningServer, raw_request, wait_until

# The fake engine repeats a prompt's first token; candidates are it and the ids after it, each 0.5 less likely.
BEAMS = {"use_beam_search": True, "length_penalty": 0.0}


def test_completion(client: openai.OpenAI) -> None:
    """Oracle: by hand.  Two prompts of one byte; the beams of "a" are aa, ab and ba, best first."""
    answer = client.completions.create(
        model="demo", prompt=["a", "k"], n=3, max_tokens=2, logprobs=1, echo=False, extra_body=BEAMS
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == ["aa", "ab", "ba", "kk", "kl", "lk"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.tokens == ["a", "b"] and logprobs.token_logprobs == [-0.5, -1.0]
    assert logprobs.top_logprobs == [{"a": -0.5}, {"a": -0.5, "b": -1.0}]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)


def test_best_of_is_the_width(client: openai.OpenAI) -> None:
    """Oracle: the best of the wider search."""
    answer = client.completions.create(
        model="demo", prompt="a", n=2, best_of=4, max_tokens=3, echo=True, extra_body=BEAMS
    )
    assert [choice.text for choice in answer.choices] == ["aaaa", "aaab"]


def test_an_eos_ends_a_beam(client: openai.OpenAI) -> None:
    """Oracle: by hand.  The end of turn is the second likeliest token, after its predecessor; its text is not shown."""
    answer = client.completions.create(
        model="demo", prompt=[END_OF_TURN - 1], n=2, max_tokens=1, extra_body={**BEAMS, "return_token_ids": True}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop"]
    assert [choice.token_ids for choice in answer.choices] == [[END_OF_TURN - 1], [END_OF_TURN]]  # type: ignore[attr-defined]
    assert answer.choices[1].text == ""


def test_chat(client: openai.OpenAI) -> None:
    """Oracle: the shape of a chat answer with n choices."""
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hi"}], n=2, max_tokens=3,
        extra_body={**BEAMS, "ignore_eos": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.role == "assistant" and choice.finish_reason == "length" for choice in answer.choices)
    assert answer.usage is not None and answer.usage.completion_tokens == 6


def test_streams_are_refused(client: openai.OpenAI) -> None:
    """Oracle: status 400 and the field's name."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", stream=True, extra_body=BEAMS)
    assert caught.value.param == "stream"


def test_metrics_count_prompts_and_answers(server: RunningServer, client: openai.OpenAI) -> None:
    """Oracle: the number of requests sent; the rounds of the search do not count as requests."""

    def read(name: str) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tp_engine:{name}"))

    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [read(name) for name in names]
    client.completions.create(model="demo", prompt="abc", n=2, max_tokens=4, extra_body=BEAMS)
    assert [read(name) - old for name, old in zip(names, before, strict=True)] == [3, 8, 2]


def test_a_client_that_leaves_ends_the_search(server: RunningServer) -> None:
    """Oracle: the engine's record of requests has far fewer than a whole search, and none runs."""
    added = server.engine.added
    num_before, counts = len(added), [0]
    body = {"model": "demo", "prompt": "a", "n": 8, "max_tokens": 900, **BEAMS}
    with raw_request(server, body):
        wait_until(lambda: len(added) - num_before > 20, "the search to run")

    def has_settled() -> bool:
        counts.append(len(added))
        return len(counts) > 50 and counts[-1] == counts[-50]

    wait_until(has_settled, "the search to end")
    assert len(added) - num_before < 8 * 899
    server.wait_idle()
