"""What restricts a sequence's next token: a grammar, words that must not come (``bad_words``), or both.

Banned words are masked from their last token on: always those that a token has in it, and those that have begun where
the next token would complete them::

    constraint of a sequence:   GrammarMatcher   |   WordGuard   |   WordGuard( GrammarMatcher )

A sequence waits outside of the queue (``Blocked.GRAMMAR``) while its grammar is compiled.  It then keeps a constraint
of its own for life, also through preemption, because known tokens stay known.  The mask of the next token depends on
the token before it, so such a row is planned only when that token is known (``StepScheduler``); its mask travels with
that plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from tp_engine.plan import MASK_TOKENS, IntArray
from tp_engine.units import ceil_div


class WordRules(Protocol):
    """Which tokens write a request's banned words.  A place is what matters of the output's last tokens.  ``start`` is
    the place before the first token; ``never`` (n,) are the token ids that are banned at every place."""

    @property
    def start(self) -> Any: ...
    @property
    def never(self) -> IntArray: ...
    def after(self, place: Any, token_id: int) -> Any: ...
    def completing(self, place: Any) -> Sequence[IntArray]: ...


class TokenConstraint(Protocol):
    """One sequence's place in its grammar.  ``is_over``: no token may follow.  ``error``: why the grammar cannot be
    followed further, though the output is not complete."""

    is_over: bool
    error: str | None

    def accept(self, token_id: int) -> bool:
        """Return one more token; False if the grammar refuses it, which ends the output without it."""

    def forced(self) -> list[int]:
        """Tokens that must follow, as far as they are known cheaply; they could be cut otherwise."""

    def copy(self) -> TokenConstraint:
        """Return the same place, which goes its own way from here."""


class Grammar(Protocol):
    """A compiled grammar."""

    def start(self, *, ignore_eos: bool) -> TokenConstraint:
        """Return the place before the first token."""


FillMasks: TypeAlias = Callable[[Sequence[Any]], IntArray]
"""From the constraints of n sequences to the masks (n, words) of their next tokens, as ``StepPlan.masks`` has them."""


class BannedWords:
    """A request's banned words, with or without a grammar; implements ``Grammar``."""

    def __init__(self, rules: WordRules, grammar: Grammar | None = None) -> None:
        self._rules, self._grammar = rules, grammar

    def start(self, *, ignore_eos: bool) -> TokenConstraint:
        """Return the place before the first token."""
        inner = None if self._grammar is None else self._grammar.start(ignore_eos=ignore_eos)
        return WordGuard(self._rules, self._rules.start, inner)


class WordGuard:
    """One sequence's place among its banned words; implements ``TokenConstraint``."""

    def __init__(self, rules: WordRules, place: Any, inner: TokenConstraint | None) -> None:
        self.inner = inner
        self.is_over = False
        self.error: str | None = None
        self._rules, self._place = rules, place

    def accept(self, token_id: int) -> bool:
        """Return one more token; False if the grammar refuses it."""
        self._place = self._rules.after(self._place, token_id)
        if self.inner is None:
            return True
        accepted = self.inner.accept(token_id)
        self.is_over, self.error = self.inner.is_over, self.inner.error
        return accepted

    def forced(self) -> list[int]:
        """Return those of the grammar."""
        return [] if self.inner is None else self.inner.forced()

    def copy(self) -> TokenConstraint:
        return WordGuard(self._rules, self._place, None if self.inner is None else self.inner.copy())

    def banned(self) -> IntArray:
        """Return the tokens that would complete a word now."""
        return np.concatenate([self._rules.never, *self._rules.completing(self._place)])


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
            if isinstance(one, WordGuard) and len(banned := one.banned()):
                _clear(mask, banned)
        return masks


def _clear(mask: IntArray, token_ids: IntArray) -> None:
    cleared = mask.view(np.uint32).copy()
    bits = np.uint32(1) << (token_ids % MASK_TOKENS).astype(np.uint32)
    np.bitwise_and.at(cleared, token_ids // MASK_TOKENS, ~bits)
    if cleared.any():
        mask.view(np.uint32)[:] = cleared


def follow(constraint: TokenConstraint, draft_tokens: Iterable[int]) -> list[TokenConstraint]:
    """Copies of ``constraint`` behind each of ``draft_tokens``, up to the first that it refuses or that ends the
    output.

    A draft row (plan.py) is sampled under the mask that its position has if the draft tokens before it are right::

        constraint          the row's own, behind its last known token      mask of the row's next token, as always
        copies[0]           a copy that has accepted draft token 0          mask of draft row 0
        copies[1]           a copy of that, and draft token 1               mask of draft row 1

    The row's own constraint never sees a draft token: it accepts what is kept, token by token.  So a draft token that
    is wrong has nothing to take back, and an error of a copy ends the draft tokens before it, not the request.
    """
    copies: list[TokenConstraint] = []
    for token_id in draft_tokens:
        constraint = constraint.copy()
        if not constraint.accept(token_id) or constraint.is_over:
            break
        copies.append(constraint)
    return copies


def masks_of(places: list[list[TokenConstraint]], fill_masks: FillMasks) -> list[IntArray]:
    """Return for each list of ``follow`` the masks (n, words) of its first n: of those before one that has come to a
    limit."""
    masks = fill_masks([one for copies in places for one in copies])
    found: list[IntArray] = []
    for copies in places:
        count = next((place for place, one in enumerate(copies) if one.error is not None), len(copies))
        found.append(masks[:count])
        masks = masks[len(copies) :]
    return found
