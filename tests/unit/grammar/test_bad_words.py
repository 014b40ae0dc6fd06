"""Banned words: their token ids, the masks, and a whole engine that avoids them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.asgi import App, run_served
from tests.fake_engine import MODEL_INFO
from tests.tiny_server import assert_nothing_in_use, chat_tokenizer, tiny_engine
from tp_engine.api.input_processor import InputProcessor
from tp_engine.errors import RequestError
from tp_engine.plan import IntArray
from tp_engine.sampling_params import SamplingParams
from tp_engine.sched.constraint import BannedWords, MaskWriter

VOCAB = 70


class OnlyThese:
    """A grammar that always allows the same tokens, and refuses 9."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self.allowed = allowed
        self.is_over = False
        self.error: str | None = None

    def start(self, *, ignore_eos: bool) -> OnlyThese:
        return self

    def accept(self, token_id: int) -> bool:
        self.is_over = token_id == 9
        return token_id != 9

    def forced(self) -> list[int]:
        return []

    def copy(self) -> OnlyThese:
        return OnlyThese(self.allowed)


def fill_grammars(constraints: Sequence[OnlyThese]) -> IntArray:
    masks = np.zeros((len(constraints), 3 * 32), dtype=np.uint8)
    for mask, one in zip(masks, constraints, strict=True):
        mask[list(one.allowed)] = 1
    return np.packbits(masks, axis=1, bitorder="little").view(np.int32)


def allowed(mask: IntArray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def test_the_last_token_of_a_word_is_masked_behind_the_others() -> None:
    """Oracle: the definition, by hand: words [5], [1, 2, 64], [2, 63]."""
    guard = BannedWords([[5], [1, 2, 64], [2, 63]]).start(ignore_eos=False)
    write = MaskWriter(fill_grammars, VOCAB)
    everything = set(range(VOCAB))
    for token_id, banned in ((None, {5}), (1, {5}), (2, {5, 63, 64}), (2, {5, 63}), (7, {5}), (1, {5}), (3, {5})):
        if token_id is not None:
            assert guard.accept(token_id)
        assert allowed(write([guard])[0]) == everything - banned, token_id


def test_a_grammar_and_banned_words_together() -> None:
    """Oracle: the tokens that both allow; where there are none, those of the grammar; both end with the grammar."""
    grammar = OnlyThese([5, 33, 69])
    write = MaskWriter(fill_grammars, VOCAB)
    both = BannedWords([[5], [33, 69]], grammar).start(ignore_eos=False)
    words_only = BannedWords([[69]]).start(ignore_eos=False)
    impossible = BannedWords([[5], [33], [69]], grammar).start(ignore_eos=False)
    masks = write([both, grammar, words_only, impossible])
    assert [allowed(mask) for mask in masks] == [{33, 69}, {5, 33, 69}, set(range(69)), {5, 33, 69}]
    assert both.accept(33) and allowed(write([both])[0]) == {33}
    assert not both.accept(9) and both.is_over
    assert np.array_equal(write([grammar]), fill_grammars([grammar]))


def test_words_are_found_at_the_beginning_and_within_text() -> None:
    """Oracle: the tokenizer, with and without a space before the word."""
    processor, tokenizer = InputProcessor(MODEL_INFO, chat_tokenizer()), chat_tokenizer()
    request = processor.process("a", SamplingParams(bad_words=["the", "zq"]), request_id="r")
    expected = []
    for word in ("the", "zq"):
        first, within = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word))
        expected += [first, within] if len(first) == len(within) and first[0] != within[0] else [first]
    assert request.banned_words == tuple(expected) and request.is_constrained
    assert not processor.process("a", SamplingParams(), request_id="r").is_constrained
    with pytest.raises(RequestError, match="needs a tokenizer"):
        InputProcessor(MODEL_INFO, None).process([5], SamplingParams(bad_words=["x"]), request_id="r")
    for wrong in (["", "a"], [" "], ["x"] * 2000, "the"):
        with pytest.raises(RequestError, match="bad"):
            SamplingParams(bad_words=wrong)


def test_an_engine_avoids_them(tmp_path: Path) -> None:
    """Oracle: the run without banned words: equal up to the banned token, which never follows the token before it;
    ``n`` sequences and requests beside them are served too."""
    with tiny_engine(tmp_path / "model") as engine:

        async def scenario(app: App) -> None:
            body: dict[str, Any] = {
                "prompt": "ab", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            (plain,) = (await app.post("/v1/completions", body)).json()["choices"]
            text = next(piece for token in plain["token_ids"] if (piece := chat_tokenizer().decode([token])).isalnum())
            word = chat_tokenizer().encode(text, add_special_tokens=False)
            assert len(word) == 1
            first = plain["token_ids"].index(word[0])
            reply = await app.post("/v1/completions", {**body, "bad_words": [text], "n": 2})
            for choice in reply.json()["choices"]:
                assert choice["token_ids"][:first] == plain["token_ids"][:first]
                assert word[0] not in choice["token_ids"] and len(choice["token_ids"]) == 24
            again = (await app.post("/v1/completions", body)).json()["choices"][0]
            assert again["token_ids"] == plain["token_ids"]

        run_served(scenario, engine, chat_tokenizer())
        assert_nothing_in_use(engine)
