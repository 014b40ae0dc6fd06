"""Rows whose sequences have a grammar: each one's place in it is advanced with its tokens.

A sequence waits in ``SequencePhase.COMPILING`` while its grammar is compiled.  It then keeps a constraint of its own
for life, also through preemption, because known tokens stay known.  The mask of the next token depends on the token
before it, so such a row is planned only when that token is known (``StepBuilder``); its mask travels with that plan.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from tp_engine.plan import IntArray, StepPlan
from tp_engine.request import FinishReason
from tp_engine.sched.constraint import FillMasks
from tp_engine.sched.outcome import StepOutcome
from tp_engine.sched.row_state import RowState
from tp_engine.sched.stop_check import Ending


def with_masks(plan: StepPlan, rows: RowState, fill_masks: FillMasks) -> StepPlan:
    """The plan with a mask for every constrained row that it samples."""
    sampled = plan.sampled_rows
    constrained: IntArray = sampled[rows.is_constrained[sampled]]
    if not len(constrained):
        return plan
    constraints = [sequence.constraint for sequence in rows.row_set(constrained).sequences]
    return structs.replace(plan, mask_rows=constrained, masks=fill_masks(constraints))


def advance_constraints(outcome: StepOutcome, sampled: IntArray, rows: RowState) -> None:
    """Take the new tokens of constrained rows; some sequences end with them, or without a token that was refused.

    A token is refused only where something else (min_tokens, allowed_token_ids) bans all that the grammar allows.
    """
    for position in np.flatnonzero(rows.is_constrained[sampled]).tolist():
        constraint = outcome.sequences[position].constraint
        assert constraint is not None
        if not constraint.accept(int(outcome.token_ids[position])):
            outcome.dropped.append(position)
        elif not constraint.is_over or _has_stopped(outcome, position):
            continue
        reason = FinishReason.STOP if constraint.error is None else FinishReason.ERROR
        outcome.endings[position] = Ending(reason, error=constraint.error, by_grammar=True)


def _has_stopped(outcome: StepOutcome, position: int) -> bool:
    """Whether a stop token has ended the sequence too: that is the better reason."""
    end = outcome.endings.get(position)
    return end is not None and end.reason is FinishReason.STOP
