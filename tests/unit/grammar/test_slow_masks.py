"""Masks that take too long end their own requests, and hold up the others for a moment only."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest

from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import GrammarCompiler, compile_grammar
from tp_engine.grammar.matcher import GrammarMatcher, MaskFiller, Pace
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

    def __getattr__(self, name: str) -> Any:
        self.num_touched += 1
        raise AttributeError(name)


def test_one_slow_mask_holds_up_nobody() -> None:
    """Oracle: the masks of the others alone; the slow grammar's outputs have an error, and its matcher, whose thread
    goes on, is not touched again, nor are the masks that were returned."""
    vocabulary, fill = byte_vocabulary(), MaskFiller()
    good = compile_grammar(StructuredOutputsParams(regex="[a-c]x"), vocabulary)
    (alone,) = fill([good.start()])
    busy, pace = Busy(), Pace()
    slow = GrammarMatcher(busy, vocabulary, pace, ignore_eos=False)
    sister = GrammarMatcher(Busy(), vocabulary, pace, ignore_eos=False)
    masks = fill([good.start(), slow, good.start(), sister, *(good.start() for _ in range(60))])
    assert not busy.ended.is_set()
    others = np.delete(masks, (1, 3), axis=0)
    assert (others == alone).all()
    assert (masks[[1, 3]] == vocabulary.end_mask).all()
    for matcher in (slow, sister, slow.copy()):
        assert "takes too long" in str(matcher.error)
        assert matcher.forced() == [] and not matcher.accept(5) and matcher.is_over
    before = masks.copy()
    busy.enough.set()
    assert busy.ended.wait(DEADLINE_S)
    assert np.array_equal(masks, before) and busy.num_touched == 0


def test_outputs_behind_the_same_tokens_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the masks of a grammar that is compiled for each output; by hand: one is found for each place."""
    vocabulary, fill, params = byte_vocabulary(), MaskFiller(), StructuredOutputsParams(regex="(a|b)[0-9]{1,3}c*")
    shared = compile_grammar(params, vocabulary)
    outputs = [shared.start() for _ in range(8)]
    alone = [compile_grammar(params, vocabulary).start() for _ in range(8)]
    found: list[GrammarMatcher] = []
    write = GrammarMatcher.write_mask

    def counting(matcher: GrammarMatcher, mask: IntArray) -> None:
        found.append(matcher)
        write(matcher, mask)

    monkeypatch.setattr(GrammarMatcher, "write_mask", counting)
    for tokens, num_places in ((b"abababab", 1), (b"11111111", 2), (b"11551155", 2), (b"cccccccc", 4)):
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
