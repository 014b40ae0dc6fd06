"""The incremental detokenizer.  The oracle is always the tokenizer's own decoding of all ids at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text_tokenizers import (
    TRAINING_TEXT,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    slow_tokenizer,
)
from tp_engine.engine.sequence_text import IncrementalDetokenizer
from tp_engine.engine.tokenizer import TokenDecoder

MAKERS = {
    "byte level": byte_level_tokenizer,
    "byte fallback": byte_fallback_tokenizer,
    "metaspace": metaspace_tokenizer,
    "slow": slow_tokenizer,
}
HARD_TEXTS = [
    *TRAINING_TEXT,
    "😀😃👨‍👩‍👧‍👦🇩🇪🏳️‍🌈",
    "a\u0301e\u0308 नमस्ते ไทย עברית العربية",
    "  two  spaces   three ",
    "real \ufffd replacement \ufffd\ufffd characters \ufffd",
    "世界x世界\n\t世",
    "",
]
DECODERS: dict[str, TokenDecoder] = {}


def decoder_of(name: str) -> TokenDecoder:
    return DECODERS.setdefault(name, TokenDecoder(MAKERS[name]()))


def expected(tokenizer: Any, ids: list[int], skip: bool) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def streamed(name: str, ids: list[int], skip: bool) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(decoder_of(name), skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_stream_to_their_decoding(name: str, skip: bool, data: st.DataObject) -> None:
    """Random ids: broken UTF-8, interrupted byte runs, special tokens anywhere."""
    tokenizer = MAKERS[name]()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    pieces, rest = streamed(name, ids, skip)
    assert "".join(pieces) + rest == expected(tokenizer, ids, skip)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=50, deadline=None)
@given(text=st.one_of(st.sampled_from(HARD_TEXTS), st.text(max_size=30)), cut=st.integers(0, 40))
def test_every_prefix_streams_to_its_decoding(name: str, text: str, cut: int) -> None:
    """A text's ids, cut anywhere, also within a character."""
    tokenizer = MAKERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)[:cut]
    pieces, rest = streamed(name, ids, skip=True)
    assert "".join(pieces) + rest == expected(tokenizer, ids, True)


@pytest.mark.parametrize("name", ["byte level", "slow"])
@pytest.mark.parametrize("text", [text for text in HARD_TEXTS if text and "\ufffd" not in text])
def test_whole_characters_are_not_held_back(name: str, text: str) -> None:
    """Oracle: the streamed text of a complete text is all of it, and no piece shows half a character."""
    ids = MAKERS[name]().encode(text, add_special_tokens=False)
    pieces, rest = streamed(name, ids, skip=True)
    assert ("".join(pieces), rest) == (text, "")


def test_a_byte_run_is_held_until_it_ends() -> None:
    """Oracle: byte fallback decodes a run as a whole: valid bytes become U+FFFD when a broken one follows in the
    run."""
    tokenizer = byte_fallback_tokenizer()
    smile = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "😀".encode()]
    letter = tokenizer.convert_tokens_to_ids("a")
    assert streamed("byte fallback", [*smile, letter], skip=True) == (["", "", "", "", "😀a"], "")
    assert streamed("byte fallback", [*smile, smile[0], letter], skip=True) == ([""] * 5 + ["\ufffd" * 5 + "a"], "")


@pytest.mark.parametrize("name", ["byte level", "slow"])
def test_endless_broken_bytes_cost_bounded_time_each(name: str) -> None:
    """Oracle: the window stays small for lead bytes without end, the text equals the decoding; later text is right
    too."""
    tokenizer = MAKERS[name]()
    lead = tokenizer.encode("😀", add_special_tokens=False)[0] if name == "slow" else byte_level_lead(tokenizer)
    ids = [lead] * 1000 + tokenizer.encode("then 世界 😀", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(decoder_of(name), skip_special_tokens=True)
    text = ""
    for token_id in ids:
        text += detokenizer.push(token_id)
        assert len(detokenizer._window) <= 65
    assert text + detokenizer.flush() == expected(tokenizer, ids, True)


def byte_level_lead(tokenizer: Any) -> int:
    """The token of the single byte 0xF0."""
    return int(tokenizer.convert_tokens_to_ids("ð"))


def test_the_rust_decoder_is_used_where_it_may_be() -> None:
    """Oracle: a fast tokenizer's wrapper is bypassed; a wrapper with its own decoding is used."""

    class Shouting(type(byte_level_tokenizer())):  # type: ignore[misc]
        def _decode(self, *args: Any, **options: Any) -> str:
            return str(super()._decode(*args, **options)).upper()

    shouting = Shouting(tokenizer_object=byte_level_tokenizer().backend_tokenizer, eos_token="</s>")
    ids = shouting.encode("the fox", add_special_tokens=False)
    assert TokenDecoder(shouting).decode(ids) == "THE FOX"
    assert "backend" in decoder_of("byte level").decode.__code__.co_freevars
