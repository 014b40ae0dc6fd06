"""Grammars, words and lists of token ids that leave no token: refused, or ended; never a token that they forbid."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.asgi import App, Reply, run_served
from tests.fake_engine import MODEL_INFO
from tests.masks import AtOnce
from tests.tiny_server import assert_nothing_in_use, chat_tokenizer, tiny_engine
from tp_engine import LLM
from tp_engine.api.input_processor import InputProcessor
from tp_engine.engine.engine import Engine
from tp_engine.errors import NO_TOKEN_LEFT, RequestError
from tp_engine.features.structured_output.constraint import MaskWriter, TokenGuard, TokenRules, follow, masks_of
from tp_engine.grammar.banned_words import TokenWords
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import make_vocabulary
from tp_engine.plan import IntArray
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams

VOCAB = 384
EOS = 1
A, B, C = (chat_tokenizer().encode(text, add_special_tokens=False)[0] for text in "qxj")
VOCABULARY = make_vocabulary(chat_tokenizer().backend_tokenizer.to_str(), VOCAB, (EOS,))


def guard_of(regex: str | None = None, words: Any = (), **params: Any) -> TokenGuard:
    """The place before the first token of a request."""
    shape = None if regex is None else StructuredOutputsParams(regex=regex)
    request = EngineRequest(
        request_id="r", prompt_token_ids=[5], params=SamplingParams(structured_outputs=shape, **params),
        eos_token_ids=(EOS,),
    )  # fmt: skip
    grammar = None if shape is None else compile_grammar(shape, VOCABULARY)
    return TokenRules(TokenWords(words), request, VOCAB, grammar).start(ignore_eos=params.get("ignore_eos", False))


def allowed(mask: IntArray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


MASKS = MaskWriter(AtOnce(), VOCAB)


@pytest.mark.parametrize(
    ("tokens", "left", "ends", "rules"),
    [
        ([A], {A, B}, None, {"words": [(B, A)], "allowed_token_ids": [A, B]}),
        ([B], {B}, None, {"words": [(B, A)], "allowed_token_ids": [A, B]}),
        ([A], set(), "error", {"words": [(A, A)], "allowed_token_ids": [A]}),
        ([A], set(), "error", {"regex": "qx", "allowed_token_ids": [A, C]}),
        ([A], set(), "error", {"regex": "q(x|j)", "words": [(A, B)], "allowed_token_ids": [A, B]}),
        ([A], {C}, None, {"regex": "q(x|j)", "words": [(A, B)], "allowed_token_ids": [A, B, C]}),
        ([A], set(), "error", {"regex": "qx", "words": [(A, B)]}),
        ([A], {B, EOS}, None, {"regex": "qx*", "allowed_token_ids": [A, B, EOS]}),
        ([A], {B}, None, {"regex": "qx*", "allowed_token_ids": [A, B, EOS], "min_tokens": 2}),
        ([A, B], {B, EOS}, None, {"regex": "qx*", "allowed_token_ids": [A, B, EOS], "min_tokens": 2}),
        ([A], set(), "stop", {"regex": "qx*", "allowed_token_ids": [A]}),
        ([A], set(), "stop", {"regex": "qx*", "allowed_token_ids": [A, EOS], "min_tokens": 5}),
        ([A], set(), "stop", {"regex": "qx*", "words": [(B,)], "min_tokens": 5}),
        ([A], set(), "error", {"regex": "qx", "stop_token_ids": [B], "min_tokens": 5}),
        ([A], {C}, None, {"stop_token_ids": [B], "min_tokens": 5, "allowed_token_ids": [A, B, C], "words": [(A, A)]}),
        (
            [C],
            set(),
            "error",
            {"stop_token_ids": [B], "min_tokens": 5, "allowed_token_ids": [A, B, C], "words": [(C, A), (C, C)]},
        ),
    ],
    ids=str,
)
def test_what_is_left(tokens: list[int], left: set[int], ends: str | None, rules: dict[str, Any]) -> None:
    """Oracle: by hand: the tokens that all allow; where none is left, nothing follows: a grammar's output is complete
    where the grammar may end, and all other outputs end with an error."""
    guard = guard_of(**rules)
    MASKS.wait(guard)
    assert not guard.is_over and all(guard.accept(token) for token in tokens), guard.error
    mask = MASKS.wait(guard)
    assert guard.is_over is (ends is not None)
    if ends is None:
        assert allowed(mask) == left
        return
    assert not guard.accept(A) and not guard.copy().accept(B)
    assert (guard.error is None) == (ends == "stop") and (ends == "stop" or guard.error_code == NO_TOKEN_LEFT)


def test_draft_tokens_end_where_no_token_is_left() -> None:
    """Oracle: by hand: a draft token that a list refuses is none, and behind the last that may follow there is none."""
    guard = guard_of(words=[(A, A)], allowed_token_ids=[A])
    copies = follow(guard, [A, A])
    assert len(copies) == 2 and [len(one) for one in masks_of([copies], MASKS)] == [0]
    assert follow(guard, [B, A]) == [] and not guard.is_over
    longer = follow(guard_of(words=[(A, A, A)], allowed_token_ids=[A]), [A, A, A])
    assert [len(one) for one in masks_of([longer], MASKS)] == [1]


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        (("allowed_token_ids", "bad_words"), {"allowed_token_ids": [A], "bad_words": ["q"]}),
        (("allowed_token_ids", "bad_words"), {"allowed_token_ids": [A, B, A], "bad_words": ["x", "q"]}),
        (("allowed_token_ids", "min_tokens"), {"allowed_token_ids": [2], "min_tokens": 1}),
        (("allowed_token_ids", "min_tokens"), {"allowed_token_ids": [C], "stop_token_ids": [C], "min_tokens": 3}),
        (
            ("allowed_token_ids", "bad_words", "min_tokens"),
            {"allowed_token_ids": [A, 2], "bad_words": ["q"], "min_tokens": 1},
        ),
        (("min_tokens",), {"stop_token_ids": list(range(VOCAB)), "min_tokens": 1}),
    ],
    ids=str,
)
def test_lists_without_a_first_token_are_refused(fields: tuple[str, ...], params: dict[str, Any]) -> None:
    """Oracle: the error names each field that takes part, and no other; with one of them relaxed all is well."""
    info = msgspec.structs.replace(MODEL_INFO, vocab_size=VOCAB, eos_token_ids=(2,))
    processor = InputProcessor(info, chat_tokenizer())
    with pytest.raises(RequestError, match="leave no token") as caught:
        processor.process([5], SamplingParams(**params), request_id="r")
    text = str(caught.value)
    assert (caught.value.param, caught.value.code) == (fields[0], NO_TOKEN_LEFT)
    assert {name for name in ("allowed_token_ids", "bad_words", "min_tokens") if name in text} == set(fields)
    relaxed = {**params, "min_tokens": 0} if "bad_words" not in fields else {**params, "bad_words": []}
    if fields != ("allowed_token_ids", "bad_words", "min_tokens"):
        processor.process([5], SamplingParams(**relaxed), request_id="r")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One with draft tokens."""
    speculation = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "max_step_rows": 16}'
    with tiny_engine(tmp_path_factory.mktemp("model") / "model", speculative_config=speculation) as made:
        yield made


def _cases() -> Iterator[dict[str, Any]]:
    """Pairs, triples and more of all fields that forbid tokens."""
    draw = random.Random(5)
    choices: dict[str, list[Any]] = {
        "allowed_token_ids": [[A], [A, B], [A, B, C, EOS], [EOS]],
        "bad_words": [["q"], ["qx"], ["qq", "xx"]],
        "logit_bias": [{str(A): -100}, {str(A): 100, str(B): -100}],
        "min_tokens": [2, 5],
        "stop_token_ids": [[A], [A, B]],
        "structured_outputs": [{"regex": "q[xq]*"}, {"choice": ["qx", "j"]}, {"regex": "(qx){3}"}],
    }
    for count in (2, 3, 4):
        for names in itertools.combinations(choices, count):
            yield {name: draw.choice(choices[name]) for name in names}


def test_no_forbidden_token_in_any_combination(engine: Engine) -> None:
    """Oracle: the definitions of the fields: an answer has allowed tokens alone, no bad word, no end before
    ``min_tokens`` unless its grammar is complete, and follows its grammar as far as it goes; else status 400 that names
    the fields.  Greedy and drawn, with draft tokens; a request beside them goes on."""
    tokenizer, seen = chat_tokenizer(), set[str]()

    async def scenario(app: App) -> None:
        beside = {"prompt": "ab", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        usual = (await app.post("/v1/completions", beside)).json()["choices"][0]["token_ids"]
        for number, fields in enumerate(_cases()):
            body = {"prompt": "qxqxqqxjqx", "max_tokens": 8, "n": 2, "seed": number, "return_token_ids": True, **fields}
            other = app.start("POST", "/v1/completions", beside)
            for temperature in (0, 1):
                reply = await app.post("/v1/completions", {**body, "temperature": temperature})
                seen.add(_judged(reply, fields, tokenizer))
            assert (await other.reply()).json()["choices"][0]["token_ids"] == usual

    run_served(scenario, engine, tokenizer)
    assert seen == {"refused", "ended", "answered"}
    assert_nothing_in_use(engine)


def _judged(reply: Reply, fields: dict[str, Any], tokenizer: Any) -> str:
    if reply.status == 400:
        error = reply.json()["error"]
        assert error["code"] == NO_TOKEN_LEFT, (fields, error)
        named = [name for name in fields if name in error["message"]]
        assert named, (fields, error)
        return "ended" if error["message"].startswith("after") else "refused"
    assert reply.status == 200, (fields, reply.content)
    for choice in reply.json()["choices"]:
        ids = choice["token_ids"]
        assert set(ids) <= set(fields.get("allowed_token_ids", ids)), (fields, choice)
        text = tokenizer.decode([one for one in ids if one != EOS])
        assert set(text.split()).isdisjoint(fields.get("bad_words", ())), (fields, choice)
        if len(ids) < fields.get("min_tokens", 0):
            assert "structured_outputs" in fields and choice["finish_reason"] == "stop", (fields, choice)
    return "answered"


def test_in_python_one_output_ends_with_an_error_and_the_others_go_on() -> None:
    """Oracle: by hand: the third "4" would complete a word; what has no first token is refused, with the row."""
    with LLM(device="cpu", max_model_len=64, num_gpu_blocks_override=40) as llm:
        tokenizer: Any = llm.get_tokenizer()
        (four,) = tokenizer.encode("4", add_special_tokens=False)
        stuck = SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=[four], bad_words=["444"])
        free = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        outputs = llm.generate(["12+34="] * 3, [free, stuck, free], use_tqdm=False)
        ended = [one.outputs[0] for one in outputs]
        assert [one.finish_reason for one in ended] == ["length", "error", "length"]
        assert list(ended[1].token_ids) == [four, four] and ended[0].token_ids == ended[2].token_ids
        refused = stuck.clone(bad_words=["4"])
        with pytest.raises(RequestError, match="leave no token that may come first") as caught:
            llm.generate(["12+34="] * 2, [free, refused], use_tqdm=False)
    assert caught.value.code == NO_TOKEN_LEFT
