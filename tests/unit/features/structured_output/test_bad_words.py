"""Banned words: their token ids, the masks, and a whole engine that avoids them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.asgi import App, run_served
from tests.fake_engine import MODEL_INFO
from tests.masks import AtOnce
from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_server import assert_nothing_in_use, chat_tokenizer, tiny_engine
from tp_engine.api.input_processor import InputProcessor
from tp_engine.errors import INVALID_GRAMMAR, NO_TOKEN_LEFT, RequestError
from tp_engine.features.structured_output.constraint import MaskWriter, TokenGuard, TokenRules, WordRules
from tp_engine.features.structured_output.feature import banned_words
from tp_engine.grammar.banned_words import SpelledWords, TokenSpellings, TokenWords, WordRulesMaker
from tp_engine.grammar.vocabulary import make_vocabulary
from tp_engine.plan import IntArray
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams

VOCAB = 70


class OnlyThese:
    """A grammar that always allows the same tokens, and refuses 9."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self.allowed = allowed
        self.is_over = False
        self.error: str | None = None
        self.error_code = INVALID_GRAMMAR
        self.may_be_over, self.is_quick, self.is_ready = False, True, True

    def start(self, *, ignore_eos: bool) -> OnlyThese:
        return self

    def accept(self, token_id: int) -> bool:
        self.is_over = token_id == 9
        return token_id != 9

    def forced(self) -> list[int]:
        return []

    def decide(self) -> None:
        raise AssertionError("it knows itself")

    def settle_mask(self) -> IntArray:
        flags = np.zeros(3 * 32, dtype=np.uint8)
        flags[list(self.allowed)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)

    def may_end(self, mask: IntArray) -> bool:
        return 9 in self.allowed

    def copy(self) -> OnlyThese:
        return OnlyThese(self.allowed)


def guard_of(words: WordRules, grammar: OnlyThese | None = None, vocab_size: int = VOCAB, **params: Any) -> TokenGuard:
    """The place before the first token of a request with these words and ``params``."""
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(**params), eos_token_ids=(9,))
    return TokenRules(words, request, vocab_size, grammar).start(ignore_eos=False)


def allowed(mask: IntArray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def test_the_last_token_of_a_word_is_masked_behind_the_others() -> None:
    """Oracle: the definition, by hand: words [5], [1, 2, 64], [2, 63]."""
    guard = guard_of(TokenWords([[5], [1, 2, 64], [2, 63]]))
    write = MaskWriter(AtOnce(), VOCAB).of
    everything = set(range(VOCAB))
    for token_id, banned in ((None, {5}), (1, {5}), (2, {5, 63, 64}), (2, {5, 63}), (7, {5}), (1, {5}), (3, {5})):
        if token_id is not None:
            assert guard.accept(token_id)
        assert allowed(write([guard])[0]) == everything - banned, token_id


def test_a_grammar_and_banned_words_together() -> None:
    """Oracle: the tokens that both allow; where there are none, no token follows, with an error; both end with the
    grammar."""
    grammar = OnlyThese([5, 33, 69])
    write = MaskWriter(AtOnce(), VOCAB).of
    both = guard_of(TokenWords([[5], [33, 69]]), grammar)
    words_only = guard_of(TokenWords([[69]]))
    impossible = guard_of(TokenWords([[5], [33], [69]]), grammar)
    masks = write([both, grammar, words_only, impossible])
    assert [allowed(mask) for mask in masks[:3]] == [{33, 69}, {5, 33, 69}, set(range(69))]
    assert impossible.is_over and impossible.error is not None and impossible.error_code == NO_TOKEN_LEFT
    assert not any(impossible.accept(token_id) for token_id in range(VOCAB))
    assert both.accept(33) and allowed(write([both])[0]) == {33}
    assert not both.accept(9) and both.is_over
    assert np.array_equal(write([grammar]), [grammar.settle_mask()])


def test_words_are_found_at_the_beginning_and_within_text() -> None:
    """Oracle: the tokenizer, with and without a space before the word, whatever the numbers of tokens."""
    processor, tokenizer = InputProcessor(MODEL_INFO, chat_tokenizer()), chat_tokenizer()
    request = processor.process("a", SamplingParams(bad_words=["the", "zq", " the"]), request_id="r")
    texts = ("the", " the", "zq", " zq")
    assert banned_words(request) == tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    assert request.is_constrained
    assert not processor.process("a", SamplingParams(), request_id="r").is_constrained
    with pytest.raises(RequestError, match="needs a tokenizer"):
        InputProcessor(MODEL_INFO, None).process([5], SamplingParams(bad_words=["x"]), request_id="r")
    for wrong in (["", "a"], [" "], ["x"] * 2000, "the", ["x" * 257], ["x" * 200] * 100):
        with pytest.raises(RequestError, match="bad"):
            SamplingParams(bad_words=wrong)


# A vocabulary of whole words, longer ones, pieces of them, parts of characters, and a special token.
SPELLINGS = TokenSpellings(
    [
        b"bad", b" bad", b"\nbad", b"(bad,", b"badge", b" embad", b"bad badge", b"b", b"ba", b"ad", b"d", b"adx", b" b",
        b"x", b" ", b"\xe4\xb8", b"\x96", "世界".encode(), b"bad\xe4", b"_bad", b"Bad", b"<end>", b"", "bad。".encode(),
    ],
    special_ids=[21],
)  # fmt: skip


def banned_behind(words: list[str], behind: list[bytes], **options: Any) -> set[bytes]:
    """The spellings that are banned behind tokens of these spellings."""
    guard = guard_of(SpelledWords(words, SPELLINGS, **{"shows_special": False} | options))
    for token in behind:
        assert guard.accept(SPELLINGS.tokens.index(token))
    return {SPELLINGS.tokens[token_id] for token_id in guard.banned().tolist()}


@pytest.mark.parametrize(
    ("behind", "more"),
    [
        ([], set()),
        ([b"b"], {b"ad", b"adx"}),
        ([b" b"], {b"ad", b"adx"}),
        ([b"ba"], {b"d"}),
        ([b"x", b"b"], {b"ad", b"adx"}),
        ([b"ba", b"b"], {b"ad", b"adx"}),
        ([b"b", b"x"], set()),
        ([b"b", b"<end>"], {b"ad", b"adx"}),
        ([b"b", b""], {b"ad", b"adx"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_every_spelling_of_a_word(behind: list[bytes], more: set[bytes]) -> None:
    """Oracle: by hand: tokens with the word alone, and those that complete it; longer words and capitals are others."""
    alone = {b"bad", b" bad", b"\nbad", b"(bad,", b"bad badge", b"bad\xe4", "bad。".encode()}
    assert banned_behind(["bad"], behind) == banned_behind(["  bad"], behind) == alone | more


def test_words_of_other_kinds() -> None:
    """Oracle: by hand: characters over tokens, phrases, signs, shown special tokens, several words."""
    assert banned_behind(["世"], [b"\xe4\xb8"]) == {b"\x96"}
    assert banned_behind(["世"], []) == set()  # 世界 is a longer word
    assert banned_behind(["bad badge"], [b" bad", b" "]) == {b"bad badge", b"badge"}
    assert banned_behind([","], []) == {b"(bad,"}
    assert banned_behind(["(bad"], []) == {b"(bad,"}
    assert banned_behind(["b<end>"], [b"b"], shows_special=True) == {b"<end>"}
    assert banned_behind(["x", "badge"], [b"b", b"ad"]) == {b"x", b"badge", b"bad badge"}
    assert banned_behind(["bad"], [b"b", b"<end>"], shows_special=True) == banned_behind(["bad"], [])


@pytest.mark.parametrize("words", [["the"], ["stop", "a"], ["世界", "é", "d"], ["qu", "ck br"], ["x"]], ids=str)
def test_no_choice_of_tokens_writes_a_word(words: list[str]) -> None:
    """Oracle: the text: no word stands alone in it, and each longer word that has one is of a single token.

    The tokens are drawn from those that are allowed, most of them from pieces of the words.
    """
    tokenizer, draw = byte_level_tokenizer(), random.Random(0)
    spellings = TokenSpellings.of(make_vocabulary(tokenizer.backend_tokenizer.to_str(), len(tokenizer), (1,)))
    assert spellings.tokens[tokenizer.convert_tokens_to_ids("ðŁĳ")] == b"\xf0\x9f\x91"
    rules = SpelledWords(words, spellings, shows_special=False)
    pieces = [
        token_id
        for token_id, token in enumerate(spellings.tokens)
        if token and any(token in one.encode() for one in words)
    ]
    everything = [token_id for token_id in range(len(tokenizer)) if token_id not in spellings.special_ids]
    for _ in range(200):
        guard, ids = guard_of(rules, vocab_size=len(tokenizer)), []
        for _ in range(30):
            banned = set(guard.banned().tolist())
            wanted = pieces if draw.random() < 0.8 and set(pieces) - banned else everything
            ids.append(draw.choice([token_id for token_id in wanted if token_id not in banned]))
            guard.accept(ids[-1])
        text, token_texts = tokenizer.decode(ids), [spellings.tokens[token_id] for token_id in ids]
        for word in words:
            assert not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text), (word, text)
            inside = sum(token.count(word.encode()) for token in token_texts)
            assert b"".join(token_texts).count(word.encode()) == inside, (word, token_texts)


def test_a_word_whose_spelling_with_a_space_is_shorter(tmp_path: Path) -> None:
    """Oracle: the text, though the model is pushed to the word's tokens: the word itself is several, with a space one.

    Spellings known and unknown; the second way bans the tokenizer's own spellings alone.
    """
    tokenizer = chat_tokenizer()
    spaced = [tokenizer.decode([token_id]) for token_id in range(3, len(tokenizer))]
    word = next(
        text[1:] for text in spaced
        if text[0] == " " and text[1:].isalpha() and len(tokenizer.encode(text[1:], add_special_tokens=False)) > 1
    )  # fmt: skip
    (single,) = tokenizer.encode(" " + word, add_special_tokens=False)
    pieces = tokenizer.encode(word, add_special_tokens=False)
    with tiny_engine(tmp_path / "model") as engine:

        async def scenario(app: App) -> None:
            body: dict[str, Any] = {"prompt": "ab", "max_tokens": 24, "temperature": 0.5, "seed": 7, "ignore_eos": True}
            pushed = {str(token_id): 20 for token_id in (single, *pieces)}
            free = (await app.post("/v1/completions", body | {"logit_bias": pushed})).json()["choices"][0]["text"]
            assert word in free
            kept = body | {"logit_bias": pushed, "bad_words": [word], "n": 3}
            for choice in (await app.post("/v1/completions", kept)).json()["choices"]:
                assert word not in choice["text"], choice

        run_served(scenario, engine, tokenizer)
        assert_nothing_in_use(engine)
    request = InputProcessor(MODEL_INFO, tokenizer).process("a", SamplingParams(bad_words=[word]), request_id="r")
    rules = WordRulesMaker(None).rules(request, banned_words(request))
    assert single in rules.never and isinstance(rules, TokenWords)


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


def test_words_that_begin_alike_cost_no_more_than_one() -> None:
    """Oracle: the tokens of each word by itself; all of a place are one array, found once however often it comes."""
    words = ["a" * 100 + chr(ord("b") + number) for number in range(20)]
    spellings = TokenSpellings([bytes((value,)) for value in range(256)] + [b"aab", b"aax"])
    rules = SpelledWords(words, spellings, shows_special=True)
    place = rules.start
    for _ in range(300):
        place = rules.after(place, ord("a"))
    (found,) = rules.completing(place)
    assert found.tolist() == [*range(ord("b"), ord("b") + 20), 256]
    assert rules.completing(rules.after(place, ord("a")))[0] is found
    alone = [SpelledWords([word], spellings, shows_special=True) for word in words]
    for one, last in zip(alone, range(ord("b"), ord("b") + 20), strict=True):
        here = one.start
        for _ in range(100):
            here = one.after(here, ord("a"))
        assert one.completing(here)[0].tolist() == [last, *([256] if last == ord("b") else [])]
