"""One output's place in its grammar, and the tokens that may follow.

::

    compiled --start()--> running --accept(token)--> running | over
                                                              |
                             nothing may follow, an end token was accepted, a token was refused, or a limit reached
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from tp_engine.errors import INVALID_GRAMMAR
from tp_engine.grammar.vocabulary import GrammarVocabulary
from tp_engine.plan import MASK_TOKENS, IntArray

# Processor time.  Masks of ordinary grammars take 0.01 to 1 ms, up to 40 ms where the library has much to build.
_MEAN_S = 0.01
_ALLOWANCE_S = 0.5
_QUICK_S = 0.001
_MEMORY = 4  # masks
_MOST_COUNTED_S = 0.002  # so that one such mask does not make a grammar slow
_NO_TOKEN = "none of the model's tokens writes what must follow"


class Pace:
    """How fast the tokens that may follow are found in one grammar, over all its outputs.

    It lives as long as any of them, or the grammar itself; meanwhile they hold about ``num_bytes``.
    ``failure`` is set once one mask takes too long (``MaskFiller``), or masks take more than ``_MEAN_S`` on average.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self.failure: str | None = None
        self.usual_s = 0.0  # of its last masks
        self._left_s = _ALLOWANCE_S

    @property
    def is_quick(self) -> bool:
        """Whether its last masks took so little time that others may wait for the next one."""
        return self.usual_s < _QUICK_S

    def note_mask(self, cpu_s: float) -> None:
        """Note that a token and the mask after it took ``cpu_s``."""
        self.usual_s += (min(cpu_s, _MOST_COUNTED_S) - self.usual_s) / _MEMORY
        self.note(cpu_s)

    def note(self, cpu_s: float) -> None:
        """Note that something took ``cpu_s``."""
        self._left_s = min(_ALLOWANCE_S, self._left_s + _MEAN_S - cpu_s)
        if self._left_s < 0:
            self.fail()

    def fail(self) -> None:
        """Note that it takes too long."""
        self.failure = "finding the tokens that may follow takes too long; make the grammar simpler"

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Note the processor time of what this thread does within."""
        began_s = time.thread_time()
        yield
        self.note(time.thread_time() - began_s)


class GrammarPlace:
    """Where the outputs of a grammar are after the same tokens.  They share one, as long as any of them is there, and
    with it the library's ``mask`` (own words,): copies of a prompt, or many requests with one schema, cost as much as
    one.  Once there is a mask, it is known whether the library ``is_stopped``, because nothing may follow, or
    ``is_accepting``, because the output is complete.  ``behind_it`` is a matcher of the library that has taken the
    tokens, for those that have not (``GrammarMatcher.accept``)."""

    __slots__ = ("__weakref__", "_behind", "behind_it", "is_accepting", "is_stopped", "mask")

    def __init__(self) -> None:
        self.mask: IntArray | None = None
        self.is_stopped = self.is_accepting = False
        self.behind_it: Any = None
        self._behind: dict[int, weakref.ref[GrammarPlace]] = {}

    def behind(self, token_id: int) -> GrammarPlace:
        """The place after one more token."""
        known = self._behind.get(token_id)
        place = None if known is None else known()
        if place is None:
            place = GrammarPlace()
            self._behind[token_id] = weakref.ref(place)
        return place


class GrammarMatcher:
    """One sequence's place in a grammar; implements the scheduler's ``TokenConstraint``.

    ``is_over``: no token may follow; while it ``may_be_over``, only the mask will tell.  ``error``: why the grammar
    cannot be followed any further, if a limit is the reason and not the grammar's end.  ``ignore_eos``: an end token is
    allowed only if no other token is.

    While a thread finds its mask, only ``is_ready`` and ``give_up`` may be used.
    """

    error_code = INVALID_GRAMMAR

    def __init__(
        self,
        matcher: Any,
        vocabulary: GrammarVocabulary,
        pace: Pace,
        *,
        ignore_eos: bool,
        place: GrammarPlace | None = None,
    ) -> None:
        self.place = place or GrammarPlace()
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._pace = pace
        self._ignore_eos = ignore_eos
        self._untaken: list[int] = []  # tokens that the library's matcher has not taken yet
        self._accept_s = 0.0
        self.is_over = self.may_be_over = False
        self.error: str | None = None

    @property
    def usual_s(self) -> float:
        """The processor time that its mask will probably take."""
        return self._pace.usual_s

    @property
    def is_quick(self) -> bool:
        """Whether its mask will probably take hardly any time."""
        return self._pace.is_quick

    @property
    def is_ready(self) -> bool:
        """Whether ``settle_mask`` may be called: its place has a mask, or it will never have one."""
        return self.place.mask is not None or self.error is not None or self._pace.failure is not None

    def accept(self, token_id: int) -> bool:
        """Add a token; False if the grammar refuses it, and then the output ends without it.

        In a slow grammar this takes the library some time, too; a token that the mask allows is then taken by the
        thread that finds the next mask."""
        if self.is_over or not self._is_sound():
            self.is_over = True
            return False
        if not self.is_quick and self._allows(token_id):
            self._untaken.append(token_id)
            self.may_be_over = True
        else:
            began_s = time.thread_time()
            self._catch_up()
            if not self._matcher.try_consume_tokens([token_id]):
                self.is_over = True
                self._check_complete()
                return False
            self._accept_s = time.thread_time() - began_s
            self.is_over = self._matcher.is_stopped()
            self.may_be_over = not self.is_over and self._ignore_eos and self._matcher.is_accepting()
        self.place = self.place.behind(token_id)
        self._is_sound()
        return True

    def decide(self) -> None:
        """Find out whether it is over, now that there is a mask."""
        if self.may_be_over and self.place.mask is not None:
            self.may_be_over = False
            self.is_over = self.place.is_stopped or (
                self._ignore_eos
                and self.place.is_accepting
                and not (self._own_mask() & ~self._vocabulary.end_mask).any()
            )
            if self.is_over and not self.place.is_accepting:
                self.fail(_NO_TOKEN)

    def forced(self) -> list[int]:
        """The tokens that must follow, as the tokenizer writes their text; others may write the same text.

        A copy is asked, so that no limit of the library is reached here.
        """
        if self.is_over or not self.is_quick or not self._is_sound():
            return []
        with self._pace.timed():
            self._catch_up()
            found: list[int] = self._matcher.deep_copy().compute_ff_tokens()
        return found

    def may_end(self, mask: IntArray) -> bool:
        """Whether the output is complete here, by the ``mask`` of the next token."""
        return bool((mask & self._vocabulary.end_mask).any()) or self._matcher.is_accepting()

    def copy(self) -> GrammarMatcher:
        """A copy, which accepts its own tokens from here on; takes microseconds."""
        with self._pace.timed():
            matcher = self._matcher.deep_copy() if self._is_sound() else None
        other = GrammarMatcher(matcher, self._vocabulary, self._pace, ignore_eos=self._ignore_eos, place=self.place)
        other.is_over, other.may_be_over, other.error = self.is_over, self.may_be_over, self.error
        other._untaken = self._untaken.copy()
        return other

    def find_mask(self) -> None:
        """Let the library write the mask, for all at this place, unless there is an ``error``; in any thread."""
        if self.error is not None or self._pace.failure is not None:
            return
        mask: IntArray = np.zeros(self._vocabulary.num_own_words, dtype=np.int32)
        began_s, has_untaken = time.thread_time(), bool(self._untaken)
        with contextlib.suppress(ValueError):  # at a limit, which its error state tells
            self._catch_up()
            if not self._matcher.is_stopped():
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._pace.note_mask(time.thread_time() - began_s + self._accept_s)
        if self._is_sound():
            place, matcher = self.place, self._matcher
            place.is_stopped, place.is_accepting = matcher.is_stopped(), matcher.is_accepting()
            place.behind_it = matcher.deep_copy() if has_untaken else None
            place.mask = mask

    def give_up(self) -> None:
        """Stop following this grammar, whose mask takes too long."""
        self._pace.fail()
        self._is_sound()

    def fail(self, reason: str) -> None:
        """Stop following the grammar in this output."""
        self.error = f"the grammar cannot be followed any further: {reason}"

    def settle_mask(self) -> IntArray:
        """What may be sampled: a new mask (words,) int32, in which at least one bit is set.  If the output turns out to
        be over, any token may be, which is then refused."""
        end_mask = self._vocabulary.end_mask
        if not self._is_sound():
            return _any_of(end_mask)
        self._catch_up()
        self.decide()
        if self.is_over:
            return np.full_like(end_mask, -1)
        mask = self._own_mask()
        if self._ignore_eos and (others := mask & ~end_mask).any():
            return others
        return mask.copy() if mask.any() else _any_of(end_mask)

    def _allows(self, token_id: int) -> bool:
        """Whether there is a mask that allows the token."""
        mask = self.place.mask
        return mask is not None and bool(int(mask[token_id // MASK_TOKENS]) >> token_id % MASK_TOKENS & 1)

    def _catch_up(self) -> None:
        """Let the library's matcher take the tokens that it has not taken."""
        if self._untaken:
            tokens, self._untaken = self._untaken, []
            if self.place.behind_it is not None:
                self._matcher = self.place.behind_it.deep_copy()
            elif self._matcher.try_consume_tokens(tokens) < len(tokens) and self._is_sound():
                self.fail(_NO_TOKEN)

    def _own_mask(self) -> IntArray:
        """The library's mask for the model's tokens (words,); not to be changed."""
        assert self.place.mask is not None, "the mask is not there"
        return self.place.mask[: self._vocabulary.num_words]

    def _check_complete(self) -> None:
        """Note an error if the output ends here and the grammar does not: no token of the model writes what must
        follow, or the library's mask has one that the library itself refuses, such as a special token."""
        if self._is_sound() and not self._matcher.is_accepting():
            self.fail(_NO_TOKEN)

    def _is_sound(self) -> bool:
        """Whether there is no ``error``; notes a new one.  The library's matcher may be busy for good if there is."""
        if self.error is None:
            reason = self._pace.failure
            if reason is None and self._matcher.is_error():
                reason = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
            if reason is not None:
                self.fail(reason)
        return self.error is None


def _any_of(end_mask: IntArray) -> IntArray:
    """A copy; a mask of all tokens if there is no end token."""
    return end_mask.copy() if end_mask.any() else np.full_like(end_mask, -1)
