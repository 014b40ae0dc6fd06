"""Log-probabilities over HTTP: bytes and offsets of tokens, names of alternatives, echoed prompts in streams."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.asgi import App, Reply, run_served
from tests.fake_engine import MODEL_INFO, FakeEngine
from tests.text_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer
from tp_engine.api import scored_tokens
from tp_engine.api.openai.logprobs import chat_logprobs, completion_logprobs
from tp_engine.engine.token_texts import TokenTexts
from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.plan import TokenLogprobs
from tp_engine.requests.outputs import Logprob
from tp_engine.requests.request import EngineRequest

TOKENIZERS = {
    "byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer, "metaspace": metaspace_tokenizer,
}  # fmt: skip
TEXT = "copy the 😀 ok 世界 é."
MESSAGES = [{"role": "user", "content": "a"}]


def serve(name: str, scenario: Any, said: str = TEXT) -> None:
    """Serve a model that says ``said``, and then ends."""
    tokenizer = copy.deepcopy(TOKENIZERS[name]())  # others use the same one
    if tokenizer.chat_template is None:
        tokenizer.chat_template = byte_level_tokenizer().chat_template

    def say(_request: EngineRequest) -> list[int]:
        return [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]

    info = msgspec.structs.replace(MODEL_INFO, vocab_size=len(tokenizer), max_logprobs=-1)
    run_served(scenario, FakeEngine(say, model_info=info), tokenizer)


def joined(reply: Reply) -> dict[str, Any]:
    """The choice of a streamed completion, its chunks put together."""
    whole: dict[str, Any] = {"text": "", "logprobs": {}}
    for chunk in reply.events:
        for choice in chunk["choices"]:
            whole["text"] += choice["text"]
            for column, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(column, []).extend(values)
    return whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_a_chat_are_those_of_its_text(name: str) -> None:
    """Oracle: the text's UTF-8; the official client's types; responses have the same."""

    async def scenario(app: App) -> None:
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
        answer = ChatCompletion.model_validate((await app.post("/v1/chat/completions", body)).json())
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        *content, _end = logprobs.content
        said = answer.choices[0].message.content
        assert said is not None and said.endswith("😀 ok 世界 é.")
        assert bytes(byte for token in content for byte in token.bytes or ()).decode() == said
        assert "".join(token.token for token in content) == said
        for token in content:
            assert token.top_logprobs[0].bytes == token.bytes
        raw = (await app.post("/v1/responses", {"input": "a", "top_logprobs": 3})).json()
        Response.model_validate(raw)
        part = raw["output"][0]["content"][0]
        assert part["logprobs"][: len(content)] == [token.model_dump() for token in content]

    serve(name, scenario)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"stop": "ok"}], ids=str)
def test_offsets_of_a_completion_are_places_in_its_text(name: str, fields: dict[str, Any]) -> None:
    """Oracle: the text itself, whole and streamed; a token that is part of a character is named by its bytes."""

    async def scenario(app: App) -> None:
        body = {"prompt": "a 世 the 😀.", "logprobs": 4, "max_tokens": 100, **fields}
        choice = (await app.post("/v1/completions", body)).json()["choices"][0]
        columns, text = choice["logprobs"], choice["text"]
        assert len(set(map(len, columns.values()))) == 1
        parts = 0
        for token, offset, tops in zip(columns["tokens"], columns["text_offset"], columns["top_logprobs"], strict=True):
            if token.startswith("bytes:"):
                parts += 1
                assert text[offset] in " 世界😀é"
            elif offset + len(token) <= len(text):  # else one of the stop string, or the end
                assert text.startswith(token, offset) or (token == "</s>" and offset == len(text)), (token, offset)
            assert tops is None or (len(tops) >= 4 and token in tops)
        assert parts > 0 or name == "metaspace"
        stream = joined(await app.post("/v1/completions", body | {"stream": True}))
        assert stream == {"text": text, "logprobs": columns}

    serve(name, scenario)


def test_hidden_special_tokens_take_no_place() -> None:
    """Oracle: the text, with and without the special token in its middle."""
    tokenizer = byte_level_tokenizer()
    ids = [*tokenizer.encode("the", add_special_tokens=False), 2, *tokenizer.encode("fox", add_special_tokens=False)]

    async def scenario(app: App) -> None:
        for skip in (True, False):
            body = {"prompt": "a", "logprobs": 0, "skip_special_tokens": skip, "max_tokens": len(ids)}
            choice = (await app.post("/v1/completions", body)).json()["choices"][0]
            at = [place for place, token in enumerate(choice["logprobs"]["tokens"]) if token in ("f", "fox")]
            assert choice["text"].index("f") == choice["logprobs"]["text_offset"][at[0]]

    info = msgspec.structs.replace(MODEL_INFO, vocab_size=len(tokenizer))
    run_served(scenario, FakeEngine(lambda _request: ids, model_info=info), tokenizer)


def test_no_alternative_is_lost_for_its_name() -> None:
    """Oracle: as many names as tokens; one whose name is taken is named by its id, and ids can name all."""
    tokenizer = byte_fallback_tokenizer()
    texts = TokenTexts(TokenDecoder(tokenizer))
    position = {}
    for token_id in range(len(tokenizer)):
        text, data = texts.of(token_id)
        position[token_id] = Logprob(logprob=-float(token_id), decoded_token=text, token_bytes=data)
    letter, byte = (tokenizer.convert_tokens_to_ids(name) for name in ("a", "<0x61>"))
    for as_ids in (False, True):
        columns = completion_logprobs([letter], [position], is_hidden=lambda *_: False, as_ids=as_ids)
        (tops,), (token,) = columns["top_logprobs"], columns["tokens"]
        assert len(tops) == len(tokenizer) and tops[token] == -letter
        assert as_ids or (tops["bytes:\\xf0"] == 0xF0 * -1 - 3 and tops["a"] == -byte and token == f"token_id:{letter}")


def test_a_streamed_echo_has_the_log_probabilities_of_the_whole_answer() -> None:
    """Oracle: the whole answer, for two prompts of two sequences each."""

    async def scenario(app: App) -> None:
        body = {"prompt": ["a the", "b"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 3}
        whole = (await app.post("/v1/completions", body)).json()
        reply = await app.post("/v1/completions", body | {"stream": True})
        for choice in whole["choices"]:
            columns: dict[str, list[Any]] = {}
            for chunk in reply.events:
                for one in chunk["choices"]:
                    for column, values in (one["logprobs"] or {}).items() if one["index"] == choice["index"] else ():
                        columns.setdefault(column, []).extend(values)
            assert columns == choice["logprobs"]

    serve("byte level", scenario)


def test_no_object_is_made_for_each_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are made from the engine's arrays: an object for each of a prompt's 20,000 alternatives took longer than
    the prompt.  Oracle: a count."""
    made = []

    def counted(**given: Any) -> Logprob:
        made.append(given)
        return Logprob(**given)

    monkeypatch.setattr(scored_tokens, "Logprob", counted)
    prompt = {"prompt": "a 世 the 😀.", "max_tokens": 3}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**prompt, "prompt_logprobs": 4}),
        ("/v1/completions", {**prompt, "echo": True, "logprobs": 4}),
        ("/v1/completions", {**prompt, "echo": True, "logprobs": 4, "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4, "stream": True}),
        ("/v1/responses", {"input": "a", "top_logprobs": 3}),
    ]

    async def scenario(app: App) -> None:
        for path, body in bodies:
            reply = await app.post(path, body)
            assert reply.status == 200 and b"logprob" in reply.content and made == [], path

    serve("byte level", scenario)


def test_the_order_of_alternatives() -> None:
    """Oracle: a stable sort of the mapping that ``LLM`` returns, chosen token first, by falling log-probability; ties,
    and a chosen token among the likeliest, behind them and impossible."""
    scores = np.array([[-1.0, -1.0, -2.0, -3.0, -np.inf, -0.5]], dtype=np.float32)
    for chosen in range(6):
        order = np.argsort(-scores[0], kind="stable")[:4]
        ids = np.array([[chosen, *order]], dtype=np.int32)
        rank = np.array([1 + (scores[0] > scores[0, chosen]).sum()], dtype=np.int32)
        run = scored_tokens.ScoredRun(4, None)
        run.add(TokenLogprobs(token_ids=ids, logprobs=scores[0][ids], ranks=rank), 1)
        (mapping,), tokens = scored_tokens.ScoredTokens(run), [chosen]
        assert list(mapping) == [chosen, *(one for one in order if one != chosen)]
        assert [(mapping[one].logprob, mapping[one].rank) for one in mapping if one != chosen] == [
            (scores[0, one], 1 + place) for place, one in enumerate(order) if one != chosen
        ]
        assert mapping[chosen].rank == rank[0]
        for positions in (scored_tokens.ScoredTokens(run), [mapping]):
            columns = completion_logprobs(tokens, positions, is_hidden=lambda *_: False)
            wanted = sorted(mapping, key=lambda one: -mapping[one].logprob)
            assert [*columns["top_logprobs"][0]] == [f"token_id:{one}" for one in wanted]
            (content,) = chat_logprobs(tokens, positions, 2)["content"]
            assert [one["token"] for one in content["top_logprobs"]] == [f"token_id:{one}" for one in wanted[:2]]
