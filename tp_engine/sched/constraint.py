"""What restricts a sequence's next token: a grammar, words that must not come (``bad_words``), or both.

A banned word is a sequence of token ids.  Its last token is masked where the tokens before it are the output's last
ones::

    constraint of a sequence:   GrammarMatcher   |   WordGuard   |   WordGuard( GrammarMatcher )

A sequence waits outside of the queue (``Blocked.GRAMMAR``) while its grammar is compiled.  It then keeps a constraint
of its own for life, also through preemption, because known tokens stay known.  The mask of the next token depends on
the token before it, so such a row is planned only when that token is known (``StepBuilder``); its mask travels with
that plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.plan import MASK_TOKENS, IntArray
from tp_engine.units import ceil_div

Words = Sequence[Sequence[int]]


class TokenConstraint(Protocol):
    """One sequence's place in its grammar.

    ``is_over``: no token may follow.  ``error``: why the grammar cannot be followed further, though the output is not
    complete.
    """

    is_over: bool
    error: str | None

    def accept(self, token_id: int) -> bool:
        """One more token; False if the grammar refuses it, which ends the output without it."""

    def forced(self) -> list[int]:
        """Tokens that must follow, as far as they are known cheaply; they could be cut otherwise."""

    def copy(self) -> TokenConstraint:
        """The same place, which goes its own way from here."""


class Grammar(Protocol):
    """A compiled grammar."""

    def start(self, *, ignore_eos: bool) -> TokenConstraint:
        """The place before the first token."""


FillMasks: TypeAlias = Callable[[Sequence[Any]], IntArray]
"""From the constraints of n sequences to the masks (n, words) of their next tokens, as ``StepPlan.masks`` has them."""


class BannedWords:
    """A request's banned words, with or without a grammar; implements ``Grammar``."""

    def __init__(self, words: Words, grammar: Grammar | None = None) -> None:
        self._words = [(tuple(word[:-1]), word[-1]) for word in words]
        self._grammar = grammar

    def start(self, *, ignore_eos: bool) -> TokenConstraint:
        """The place before the first token."""
        return WordGuard(self._words, None if self._grammar is None else self._grammar.start(ignore_eos=ignore_eos))


class WordGuard:
    """One sequence's last tokens, as many as the longest word needs; implements ``TokenConstraint``."""

    def __init__(self, words: list[tuple[tuple[int, ...], int]], inner: TokenConstraint | None) -> None:
        self.inner = inner
        self.is_over = False
        self.error: str | None = None
        self._words = words
        self._recent: deque[int] = deque(maxlen=max(len(before) for before, _ in words))

    def accept(self, token_id: int) -> bool:
        """One more token; False if the grammar refuses it."""
        self._recent.append(token_id)
        if self.inner is None:
            return True
        accepted = self.inner.accept(token_id)
        self.is_over, self.error = self.inner.is_over, self.inner.error
        return accepted

    def forced(self) -> list[int]:
        """Those of the grammar."""
        return [] if self.inner is None else self.inner.forced()

    def copy(self) -> TokenConstraint:
        """See ``TokenConstraint``."""
        other = WordGuard(self._words, None if self.inner is None else self.inner.copy())
        other._recent.extend(self._recent)
        return other

    def banned(self) -> list[int]:
        """The tokens that would complete a word now."""
        recent = tuple(self._recent)
        return [last for before, last in self._words if not before or recent[-len(before) :] == before]


class MaskWriter:
    """``FillMasks`` for all kinds of constraints; ``fill_grammars`` is for those of grammars alone."""

    def __init__(self, fill_grammars: FillMasks, vocab_size: int) -> None:
        self._fill_grammars = fill_grammars
        self._num_words = ceil_div(vocab_size, MASK_TOKENS)

    def __call__(self, constraints: Sequence[TokenConstraint]) -> IntArray:
        """Masks (n, words) int32; a new array.  A mask that would be empty keeps what the grammar allows."""
        if not any(isinstance(one, WordGuard) for one in constraints):
            return self._fill_grammars(constraints)
        matchers = [one.inner if isinstance(one, WordGuard) else one for one in constraints]
        places = [place for place, matcher in enumerate(matchers) if matcher is not None]
        masks: IntArray = np.full((len(constraints), self._num_words), -1, dtype=np.int32)
        if places:
            masks[places] = self._fill_grammars([matchers[place] for place in places])
        for mask, one in zip(masks, constraints, strict=True):
            if isinstance(one, WordGuard) and (banned := one.banned()):
                _clear(mask, np.array(banned))
        return masks


def _clear(mask: IntArray, token_ids: npt.NDArray[np.int64]) -> None:
    cleared = mask.view(np.uint32).copy()
    bits = np.uint32(1) << (token_ids % MASK_TOKENS).astype(np.uint32)
    np.bitwise_and.at(cleared, token_ids // MASK_TOKENS, ~bits)
    if cleared.any():
        mask.view(np.uint32)[:] = cleared
