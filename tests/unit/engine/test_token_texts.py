"""The texts and bytes of single tokens.  The oracle is the tokenizer's decoding of all ids at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.test_detokenizer import HARD_TEXTS, MAKERS, decoder_of, expected
from tp_engine.engine.token_texts import TokenTexts, name_of


def texts_of(name: str, ids: list[int], *, skip: bool) -> tuple[list[str], bytes]:
    """The texts that the tokens show, and their bytes."""
    decoder = decoder_of(name)
    texts = TokenTexts(decoder, decoder.special_ids if skip else frozenset())
    shown, data = [], b""
    for token_id in ids:
        text, token_bytes = texts.of(token_id)
        if token_id not in texts.hidden:
            shown.append(text)
            data += token_bytes
        texts.take(token_id)
    return shown, data


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=50, deadline=None)
@given(text=st.one_of(st.sampled_from(HARD_TEXTS), st.text(max_size=30)))
def test_texts_and_bytes_of_a_text_add_up(name: str, text: str) -> None:
    """Oracle: the decoding; every tokenizer, characters over several tokens, leading and double spaces."""
    tokenizer = MAKERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown, data = texts_of(name, ids, skip=False)
    assert "".join(shown) == data.decode() == expected(tokenizer, ids, False)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_offsets_are_those_of_the_text(name: str, skip: bool, data: st.DataObject) -> None:
    """Random ids, broken UTF-8 too: the texts are as long as the decoding, whose last letter ends what is pending."""
    tokenizer = MAKERS[name]()
    letter = tokenizer.encode("a", add_special_tokens=False)[-1:]
    ids = letter + data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40)) + letter
    shown, _ = texts_of(name, ids, skip=skip)
    whole = expected(tokenizer, ids, skip)
    assert len("".join(shown)) == len(whole)
    if name != "byte fallback":  # which shows a whole run of bytes as broken, as soon as one of its bytes is
        assert "".join(shown) == whole


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_many_tokens_have_the_texts_of_each(name: str, data: st.DataObject) -> None:
    """Oracle: ``of`` each token, wherever random ids have led, within broken characters and runs of bytes too."""
    decoder, some = decoder_of(name), st.lists(st.integers(0, len(MAKERS[name]()) - 1), max_size=8)
    texts = TokenTexts(decoder, decoder.special_ids)
    for token_id in data.draw(some):
        texts.take(token_id)
        asked = data.draw(some)
        assert texts.texts(asked) == texts.copy().texts(asked) == [texts.of(other)[0] for other in asked]
        assert texts.names(asked) == [name_of(texts.of(other)[1]) for other in asked]


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "slow"])
def test_parts_of_a_character(name: str) -> None:
    """Oracle: UTF-8, by hand: the token that completes a character has its text; another one would show U+FFFD."""
    tokenizer, decoder = MAKERS[name](), decoder_of(name)
    ids = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    if name == "byte level":  # which has learned a part of it
        ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "ðŁĺĢ"]
    assert [decoder.token_bytes(token_id) for token_id in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    texts = TokenTexts(decoder)
    shown = []
    for token_id in ids:
        shown.append(texts.of(token_id)[0])
        texts.take(token_id)
    assert shown == ["", "", "", "😀"]
    letter = tokenizer.encode("ab", add_special_tokens=False)[-1]
    assert texts.of(letter) == ("b", b"b")
    texts.take(letter)
    texts.take(ids[0])
    assert texts.of(letter) == ("\ufffdb", b"b")
    assert texts.of(ids[1]) == ("", b"\x9f")
