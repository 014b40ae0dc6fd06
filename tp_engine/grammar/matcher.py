"""One output's place in its grammar, and the tokens that may follow.

::

    compiled --start()--> running --accept(token)--> running | over
                                                              |
                             the grammar allows no more, an end token was accepted, a token was refused, a limit
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from tp_engine.errors import INVALID_GRAMMAR
from tp_engine.grammar.vocabulary import GrammarVocabulary
from tp_engine.plan import IntArray
from tp_engine.system.units import ceil_div

# Processor time.  Masks of ordinary grammars take 0.01 to 1 ms, and up to 40 ms where much is new.
_MOST_MASK_S = 0.2
_MEAN_S = 0.01
_ALLOWANCE_S = 0.5

_LOOK_S = 0.02
_NUM_SHARES = 4
_SHARE = 32
_NUM_THREADS = 4 * _NUM_SHARES  # some may be busy with masks that nobody waits for any more


class Pace:
    """How fast the tokens that may follow are found in one grammar, over all its outputs.

    It lives as long as one of them or the grammar itself; meanwhile they hold about ``num_bytes``.
    ``failure`` is set once one mask takes more than ``_MOST_MASK_S``, or all more than ``_MEAN_S`` each.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self.failure: str | None = None
        self._left_s = _ALLOWANCE_S

    def note(self, cpu_s: float) -> None:
        """Something took ``cpu_s``."""
        self._left_s = min(_ALLOWANCE_S, self._left_s + _MEAN_S - cpu_s)
        if self._left_s < 0:
            self.fail()

    def fail(self) -> None:
        """It takes too long."""
        self.failure = "finding the tokens that may follow takes too long; make the grammar simpler"

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Note the processor time of what this thread does within."""
        began_s = time.thread_time()
        yield
        self.note(time.thread_time() - began_s)


class GrammarPlace:
    """Where the outputs of a grammar are behind the same tokens.  They share one, as long as any of them is there, and
    so the library's ``mask`` (own words,): copies of a prompt, or many requests with one schema, cost what one does."""

    __slots__ = ("__weakref__", "_behind", "mask")

    def __init__(self) -> None:
        self.mask: IntArray | None = None  # once it was asked for
        self._behind: dict[int, weakref.ref[GrammarPlace]] = {}

    def behind(self, token_id: int) -> GrammarPlace:
        """Return the place behind one more token."""
        known = self._behind.get(token_id)
        place = None if known is None else known()
        if place is None:
            place = GrammarPlace()
            self._behind[token_id] = weakref.ref(place)
        return place


class GrammarMatcher:
    """One sequence's place in a grammar; implements the scheduler's ``TokenConstraint``.

    ``is_over``: no token may follow.  ``error``: why the grammar cannot be followed any further, if a limit is the
    reason and not the grammar's end.  ``ignore_eos``: an end token is allowed only if no other token is.
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
        self.is_over = False
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Add a token; False if the grammar refuses it, and then the output ends without it."""
        if not self._is_sound() or not self._matcher.try_consume_tokens([token_id]):
            self.is_over = True
            self._is_sound()
            return False
        self.place = self.place.behind(token_id)
        self.is_over = self._matcher.is_stopped()
        if not self.is_over and self._ignore_eos and self._matcher.is_accepting():  # the end may be all that is left
            self.is_over = not (MaskFiller()([self])[0] & ~self._vocabulary.end_mask).any()
        self._is_sound()
        return True

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as the tokenizer writes their text; others may write the same text.

        A copy is asked, so that no limit of the library is reached for it.
        """
        if self.is_over or not self._is_sound():
            return []
        with self._pace.timed():
            found: list[int] = self._matcher.deep_copy().compute_ff_tokens()
        return found

    def may_end(self, mask: IntArray) -> bool:
        """Return whether the output is complete here, by the ``mask`` of the next token."""
        return bool((mask & self._vocabulary.end_mask).any()) or self._matcher.is_accepting()

    def copy(self) -> GrammarMatcher:
        """Return a copy, which accepts its own tokens from here; takes microseconds."""
        with self._pace.timed():
            matcher = self._matcher.deep_copy() if self._is_sound() else None
        other = GrammarMatcher(matcher, self._vocabulary, self._pace, ignore_eos=self._ignore_eos, place=self.place)
        other.is_over, other.error = self.is_over, self.error
        return other

    def write_mask(self, mask: IntArray) -> None:
        """Let the library write its mask (own words,) int32, unless there is an ``error``; for any thread."""
        if self.error is None and self._pace.failure is None:
            with self._pace.timed(), contextlib.suppress(ValueError):  # at a limit, which its error state says
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def give_up(self) -> None:
        """Stop following this grammar, whose mask takes too long."""
        self._pace.fail()
        self._is_sound()

    def keep_mask(self, mask: IntArray) -> None:
        """Let all at this place have ``mask`` (own words,), as the library wrote it, unless there is an ``error``."""
        if self._is_sound():
            self.place.mask = mask

    def settle_mask(self, mask: IntArray) -> None:
        """Change ``mask`` (words,) int32, as the library wrote it, to what may be sampled; at least one bit is set."""
        end_mask = self._vocabulary.end_mask
        is_sound = self._is_sound()
        if is_sound and self._ignore_eos and (others := mask & ~end_mask).any():
            mask[:] = others
        if not is_sound or not mask.any():
            mask[:] = end_mask if end_mask.any() else -1

    def _is_sound(self) -> bool:
        """Whether there is no ``error``; notes a new one.  The library's matcher may be busy for good if there is."""
        if self.error is None:
            reason = self._pace.failure
            if reason is None and self._matcher.is_error():
                reason = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
            if reason is not None:
                self.error = f"the grammar cannot be followed any further: {reason}"
        return self.error is None


class MaskFiller:
    """Fills the masks of many sequences, in threads; releases the GIL meanwhile.

    A mask that takes too much processor time is given up, with its grammar; its thread ends at the library's limits.
    """

    def __call__(self, matchers: Sequence[GrammarMatcher]) -> IntArray:
        """Masks (n, words) int32 of ``matchers``, all of one vocabulary: bit t % 32 of word t // 32; a new array."""
        vocabulary = matchers[0]._vocabulary
        while new := {one.place: one for one in matchers if one.place.mask is None and one.error is None}:
            self._find(list(new.values()))  # one that fails leaves the others of its place to the next round
        masks: IntArray = np.zeros((len(matchers), vocabulary.num_words), dtype=np.int32)
        for matcher, mask in zip(matchers, masks, strict=True):
            if matcher.place.mask is not None:
                mask[:] = matcher.place.mask[: vocabulary.num_words]
            matcher.settle_mask(mask)
        return masks

    def _find(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Let the library write the masks of ``matchers``; each then has one at its place, or an ``error``."""
        all_places, size = range(len(matchers)), max(_SHARE, ceil_div(len(matchers), _NUM_SHARES))
        shares = [_Share(matchers, all_places[first : first + size]) for first in all_places[::size]]
        for share in shares:
            num_done = share.wait()
            first, last = share.places[0], share.places[0] + num_done
            for matcher, mask in zip(matchers[first:last], share.masks, strict=False):
                matcher.keep_mask(mask.copy())
            if last in share.places:
                matchers[last].give_up()
                if last + 1 in share.places:
                    shares.append(_Share(matchers, range(last + 1, share.places[-1] + 1)))


class _Share:
    """The masks of ``matchers`` at ``places``, which one thread finds in this order.

    ``masks`` (n, own words) belong to that thread: it may still write one that has been given up.
    """

    def __init__(self, matchers: Sequence[GrammarMatcher], places: range) -> None:
        self.places = places
        self._matchers = matchers
        self.masks: IntArray = np.zeros((len(places), matchers[0]._vocabulary.num_own_words), dtype=np.int32)
        self._num_done = 0
        self._clock: int | None = None
        self._began_s = 0.0
        self._is_left = False
        self._lock = threading.Lock()
        self._task = _threads().submit(self._run)

    def wait(self) -> int:
        """Wait for all masks, or until one takes too long; how many were found."""
        while not self._is_left:
            with contextlib.suppress(TimeoutError):
                self._task.result(_LOOK_S)
                break
            with self._lock:
                if self._clock is not None:
                    self._is_left = time.clock_gettime(self._clock) - self._began_s > _MOST_MASK_S
        return self._num_done

    def _run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        for place, mask in zip(self.places, self.masks, strict=True):
            with self._lock:
                self._began_s = time.thread_time()
            self._matchers[place].write_mask(mask)
            with self._lock:
                if self._is_left:
                    return
                self._num_done += 1


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="token-masks")
