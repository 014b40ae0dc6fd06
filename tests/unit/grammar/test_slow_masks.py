"""Masks that take too long end their own requests, and hold up the others for a moment only."""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.masks import fill
from tp_engine.errors import RequestError
from tp_engine.grammar import mask_filler
from tp_engine.grammar.compiler import GrammarCompiler, compile_grammar
from tp_engine.grammar.mask_filler import MaskFiller
from tp_engine.grammar.matcher import GrammarMatcher, Pace
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.plan import IntArray
from tp_engine.requests.structured_outputs import StructuredOutputsParams

DEADLINE_S = 100.0


class Busy:
    """A matcher of the library whose mask needs processor time until ``enough`` is set; then it allows all tokens."""

    def __init__(self) -> None:
        self.enough = threading.Event()
        self.ended = threading.Event()
        self.num_touched = 0

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.enough.is_set() and time.monotonic() < deadline:
            pass
        ctypes.memset(pointer, 0xFF, num_bytes)
        self.ended.set()

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        self.num_touched += 1
        raise AttributeError(name)


class Hanging(Busy):
    """The same, without the processor time."""

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        assert self.enough.wait(DEADLINE_S)
        ctypes.memset(pointer, 0xFF, num_bytes)
        self.ended.set()


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    made = MaskFiller()
    yield made
    made.close()


def settled(filler: MaskFiller, matchers: Sequence[GrammarMatcher]) -> IntArray:
    filler.wait(matchers)
    return np.stack([one.settle_mask() for one in matchers])


def behind_a_token(params: StructuredOutputsParams, count: int) -> list[GrammarMatcher]:
    """Outputs behind a first token; the mask before it is found with the grammar."""
    compiled = compile_grammar(params, byte_vocabulary())
    found = [compiled.start() for _ in range(count)]
    assert all(one.is_ready and one.accept(ord("a") + place % 3) for place, one in enumerate(found))
    return found


def test_one_slow_mask_holds_up_nobody(filler: MaskFiller) -> None:
    """Oracle: the masks of the others alone, found while it goes on; the slow grammar's outputs have an error in the
    end, and its matcher, whose thread goes on, is not touched again, nor are the masks that were returned."""
    vocabulary = byte_vocabulary()
    good = behind_a_token(StructuredOutputsParams(regex="[a-c]x"), 64)
    alone = fill(behind_a_token(StructuredOutputsParams(regex="[a-c]x"), 1))
    busy, pace = Busy(), Pace()
    slow = GrammarMatcher(busy, vocabulary, pace, ignore_eos=False)
    sister = GrammarMatcher(Busy(), vocabulary, pace, ignore_eos=False)
    filler.ask([slow, *good, sister])
    filler.be_patient()
    others = settled(filler, good)
    assert (others == alone).all()
    masks = settled(filler, [slow, sister])
    assert not busy.ended.is_set()
    assert (masks == vocabulary.end_mask).all()
    for matcher in (slow, sister, slow.copy()):
        assert "takes too long" in str(matcher.error)
        assert matcher.forced() == [] and not matcher.accept(5) and matcher.is_over
    before = masks.copy()
    busy.enough.set()
    assert busy.ended.wait(DEADLINE_S)
    assert np.array_equal(masks, before) and busy.num_touched == 0


def test_patience_is_for_quick_grammars(filler: MaskFiller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand: with an endless patience all that is quick is waited for, and a grammar that was slow, or has
    become late, is not."""
    monkeypatch.setattr(mask_filler, "_PATIENCE_S", DEADLINE_S)
    monkeypatch.setattr(mask_filler, "_MOST_MASK_S", DEADLINE_S)
    known, late, pace = Busy(), Busy(), Pace()
    for _ in range(3):
        pace.note_mask(0.1)
    good = behind_a_token(StructuredOutputsParams(regex="[a-c]x*"), 3)
    slow = [
        GrammarMatcher(known, byte_vocabulary(), pace, ignore_eos=False),
        GrammarMatcher(late, byte_vocabulary(), Pace(), ignore_eos=False),
    ]
    filler.ask([*slow, *good])
    filler.be_patient()
    assert [one.is_ready for one in (*slow, *good)] == [False, False, True, True, True]
    for one in (known, late):
        one.enough.set()
    filler.wait(slow)
    assert slow[0].settle_mask().all()


def test_what_nobody_holds_any_more_is_forgotten(filler: MaskFiller) -> None:
    """Oracle: reference counts: a mask that has not begun holds no output; one that has ends as it would have."""
    busy, vocabulary = [Hanging() for _ in range(5)], byte_vocabulary()
    matchers = [GrammarMatcher(one, vocabulary, Pace(), ignore_eos=False) for one in busy]
    for matcher in matchers[:4]:
        matcher._pace.usual_s = 0.0009  # a thread for each
    filler.ask(matchers)
    references = [weakref.ref(one) for one in matchers]
    deadline = time.monotonic() + DEADLINE_S
    while len(filler._running) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    del matcher, matchers
    assert references[4]() is None
    for one in busy:
        one.enough.set()
    while filler.is_busy or any(one() is not None for one in references):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not busy[4].ended.is_set()


def test_a_library_that_fails_ends_one_output(filler: MaskFiller) -> None:
    """Oracle: the error's words; another output of the grammar has its mask, and the thread goes on."""

    class Broken(Busy):
        def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
            raise ZeroDivisionError("a bug")

    pace, whole, vocabulary = Pace(), Busy(), byte_vocabulary()
    whole.enough.set()
    broken = GrammarMatcher(Broken(), vocabulary, pace, ignore_eos=False)
    other = GrammarMatcher(whole, vocabulary, pace, ignore_eos=False, place=broken.place)
    filler.wait([broken])
    assert "ZeroDivisionError: a bug" in str(broken.error) and not other.is_ready
    filler.wait([other])
    assert other.error is None and other.settle_mask().all()


SLOW_CASES = ["(a|b)[0-9]{1,3}c*", "(ab?){0,3}", "a*", "[ab]{2}(xy|z)?", "aaa"]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("regex", SLOW_CASES)
def test_tokens_of_a_slow_grammar_are_taken_with_the_next_mask(regex: str, ignore_eos: bool) -> None:
    """Oracle: the same grammar, quick: the same masks behind random tokens, alone and beside sisters, which ask no
    library for what is known; one that is over refuses the next token, whatever it is."""
    params, vocabulary, rng = StructuredOutputsParams(regex=regex), byte_vocabulary(), random.Random(regex)
    for _ in range(8):
        quick = compile_grammar(params, vocabulary).start(ignore_eos=ignore_eos)
        compiled = compile_grammar(params, vocabulary)
        slow, *sisters = [compiled.start(ignore_eos=ignore_eos) for _ in range(3)]
        for _ in range(12):
            (mask,) = fill([quick])
            if quick.is_over:
                break
            for one in (slow, *sisters):
                compiled.pace.usual_s = 1.0
                assert np.array_equal(fill([one])[0], mask) and not one.is_over and not one.forced()
            token_id = rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
            assert all(one.accept(token_id) for one in (quick, slow, *sisters))
            assert slow.may_be_over and slow._untaken == [token_id]
            sisters[1] = sisters[1].copy()
        for one in (slow, *sisters) if quick.is_over else ():
            assert (fill([one]) == -1).all() and one.is_over and not one.accept(ord("a"))
            assert one.error is None


def test_outputs_behind_the_same_tokens_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the masks of a grammar that is compiled for each output; by hand: one is found for each place, and
    none for the first, whose mask comes with the grammar."""
    vocabulary, params = byte_vocabulary(), StructuredOutputsParams(regex="(a|b)[0-9]{1,3}c*")
    shared = compile_grammar(params, vocabulary)
    outputs = [shared.start() for _ in range(8)]
    alone = [compile_grammar(params, vocabulary).start() for _ in range(8)]
    found: list[GrammarMatcher] = []
    find = GrammarMatcher.find_mask

    def counting(matcher: GrammarMatcher) -> None:
        found.append(matcher)
        find(matcher)

    monkeypatch.setattr(GrammarMatcher, "find_mask", counting)
    for tokens, num_places in ((b"abababab", 0), (b"11111111", 2), (b"11551155", 2), (b"cccccccc", 4)):
        num_before = len(found)
        masks = fill(outputs)
        assert len(found) == num_before + num_places
        assert np.array_equal(fill([*outputs, outputs[0].copy()])[:-1], masks)
        assert len(found) == num_before + num_places, "a mask is kept"
        assert np.array_equal(np.concatenate([fill([one]) for one in alone]), masks)
        for token, output, other in zip(tokens, outputs, alone, strict=True):
            assert output.accept(token) and other.accept(token)


def test_many_slow_masks_end_a_grammar() -> None:
    """Oracle: by hand: half a second, and 10 ms for each mask; a pause earns no more."""
    pace = Pace()
    for _ in range(1000):
        pace.note(0.009)
    for _ in range(24):
        pace.note(0.03)
    assert pace.failure is None
    for _ in range(3):
        pace.note(0.03)
    assert pace.failure is not None


def test_a_grammar_that_was_too_slow_is_refused() -> None:
    """Oracle: the reason, when a request asks for it again."""
    compiler = GrammarCompiler(byte_vocabulary())
    params = StructuredOutputsParams(regex="a+")
    compiler.compile(params).pace.fail()
    with pytest.raises(RequestError, match="the regex cannot be used: finding the tokens"):
        compiler.known(params)
    compiler.close()
