"""Guesses and grammars: tokens that a grammar forces, and guesses that it allows.

A lane of a row with a grammar is sampled under the mask that its position has if the guesses before it are right::

    constraint          the row's own, behind its last known token      mask of the row's next token, as always
    copies[0]           a copy that has accepted guess 0                mask of lane 0
    copies[1]           a copy of that, and guess 1                     mask of lane 1

The row's own constraint never sees a guess: it accepts what is kept, token by token (``Speculation.extend``).  So a
guess that is wrong has nothing to take back, and an error of a copy ends the guesses before it, not the request.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tp_engine.plan import IntArray
from tp_engine.sched.constraint import FillMasks, TokenConstraint
from tp_engine.sched.guesses.guesses import NO_GUESS, Guess, GuessSource
from tp_engine.sched.sequence import Sequence


class GrammarSource(GuessSource):
    """Guesses what the grammar forces, such as the keys of a schema, as a tokenizer would write it.

    Where tokens could be cut otherwise too, that is a guess like any other.
    """

    name = "grammar"
    most_matched = 0

    def guess(self, sequence: Sequence, tokens: IntArray, count: int) -> Guess:
        """See ``GuessSource``."""
        forced = [] if sequence.constraint is None else sequence.constraint.forced()
        return Guess(np.array(forced[:count], dtype=np.int32), 0) if forced else NO_GUESS


def follow(constraint: TokenConstraint, guesses: Iterable[int]) -> list[TokenConstraint]:
    """``constraint`` behind each of ``guesses``, up to the first that it refuses or that ends the output: a lane would
    have nothing to sample behind it."""
    copies: list[TokenConstraint] = []
    for token_id in guesses:
        constraint = constraint.copy()
        if not constraint.accept(token_id) or constraint.is_over:
            break
        copies.append(constraint)
    return copies


def masks_of(places: list[list[TokenConstraint]], fill_masks: FillMasks) -> list[IntArray]:
    """For each list of ``follow`` the masks (n, words) of its first n: of those before one that has come to a limit."""
    masks, first, found = fill_masks([one for copies in places for one in copies]), 0, list[IntArray]()
    for copies in places:
        count = next((place for place, one in enumerate(copies) if one.error is not None), len(copies))
        found.append(masks[first : first + count])
        first += len(copies)
    return found
