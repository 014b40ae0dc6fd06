"""Stop strings in growing text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_engine.engine.sequence_text import StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    search, shown = StopStrings(stops, include_in_output=include), ""
    for piece in pieces:
        shown += search.push(piece)
        if search.matched is not None:
            return shown, search.matched
    return shown + search.flush(), None


def oracle(stops: list[str], text: str, *, include: bool = False) -> tuple[str, str | None]:
    """By definition: the shortest prefix of the text that ends with a stop, its longest stop removed."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=4), max_size=12), include=st.booleans())
def test_any_split_gives_the_definition(stops: list[str], pieces: list[str], include: bool) -> None:
    """Oracle: brute force over all prefixes of the whole text."""
    assert run(stops, pieces, include=include) == oracle(stops, "".join(pieces), include=include)


@pytest.mark.parametrize("text", ["say STOP now", "你好。停止😀。", "e\u0301nd END", "👨‍👩‍👧 bye"])
@pytest.mark.parametrize("stops", [["STOP"], ["停止"], ["😀", "END"], ["\u0301", "👩‍👧"]])
def test_every_split_into_three(text: str, stops: list[str]) -> None:
    """Oracle: brute force; every way to cut the text twice."""
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert run(stops, pieces) == oracle(stops, text)


@settings(max_examples=300, deadline=None)
@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=4), max_size=12))
def test_only_what_may_begin_a_stop_is_held(stops: list[str], pieces: list[str]) -> None:
    """Oracle: the longest suffix of the text so far that is a proper prefix of a stop."""
    search, text, shown = StopStrings(stops, include_in_output=False), "", ""
    for piece in pieces:
        text += piece
        shown += search.push(piece)
        if search.matched is not None:
            return
        held = max(n for stop in stops for n in range(min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        assert shown == text[: len(text) - held]


def test_text_that_must_not_end_is_shown() -> None:
    """By hand: with min_tokens, a stop that ends too early does not count; one that ends later does, wherever it
    began."""
    search = StopStrings(["stop"], include_in_output=False)
    assert search.push("a stop b st", may_match=False) == "a stop b "
    assert search.push("op c") == "" and search.matched == "stop"


def test_long_stop_strings_cost_linear_time() -> None:
    """Oracle: the test's time limit, for a stop string of 200,000 characters that nearly matches again and again."""
    search = StopStrings(["a" * 200_000 + "b"], include_in_output=False)
    shown = sum(len(search.push("a" * 1000)) for _ in range(400))
    assert shown == 200_000
    assert search.push("c") == "a" * 200_000 + "c"


def test_a_stop_string_costs_what_the_text_matches_of_it() -> None:
    """1,024 sequences of a request each search for its 64 stop strings of 4,096 characters.  Oracle: a count of the
    table's entries, before and behind a match of 100 characters."""
    search = StopStrings(["ab" * 2048] * 64, include_in_output=False)
    assert {len(pattern._fallback) for pattern in search._patterns} == {1}
    assert search.push("ab" * 50 + "c") == "ab" * 50 + "c"
    assert {len(pattern._fallback) for pattern in search._patterns} == {100}
