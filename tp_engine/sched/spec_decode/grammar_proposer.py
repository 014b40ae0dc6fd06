"""Draft tokens and grammars: tokens that a grammar forces, and draft tokens that it allows.

A draft row of a row with a grammar is sampled under the mask that its position has if the draft tokens before it are
right::

    constraint          the row's own, behind its last known token      mask of the row's next token, as always
    copies[0]           a copy that has accepted draft token 0                mask of draft row 0
    copies[1]           a copy of that, and draft token 1                     mask of draft row 1

The row's own constraint never sees a draft token: it accepts what is kept, token by token (``Speculation.extend``).  So
a draft token that is wrong has nothing to take back, and an error of a copy ends the draft tokens before it, not the
request.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tp_engine.plan import IntArray
from tp_engine.sched.constraint import FillMasks, TokenConstraint
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.spec_decode.proposer import NO_PROPOSAL, Proposal, Proposer


class GrammarProposer(Proposer):
    """Drafts what the grammar forces, such as the keys of a schema, as a tokenizer would write it.

    Where tokens could be cut otherwise too, that is a draft token like any other.
    """

    name = "grammar"
    most_matched = 0

    def propose(self, sequence: Sequence, tokens: IntArray, count: int) -> Proposal:
        """Do as ``Proposer``."""
        forced = [] if sequence.constraint is None else sequence.constraint.forced()
        return Proposal(np.array(forced[:count], dtype=np.int32), 0) if forced else NO_PROPOSAL


def follow(constraint: TokenConstraint, draft_tokens: Iterable[int]) -> list[TokenConstraint]:
    """``constraint`` behind each of ``draft_tokens``, up to the first that it refuses or that ends the output: a draft
    row would have nothing to sample behind it."""
    copies: list[TokenConstraint] = []
    for token_id in draft_tokens:
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
