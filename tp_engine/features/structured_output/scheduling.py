"""Rows whose next token is restricted: their masks, and the tokens that these let through.

::

    constrain      the request's grammar is there: its first sequence begins with a constraint of its own
    on_make        so does each further one
    extend_plan    the masks of the step's sampled rows, each of which then awaits its token (``Blocked.TOKEN``)
    on_tokens      each constraint accepts its row's token; some sequences end with it, or without it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tp_engine.features.extension import Extension
from tp_engine.features.structured_output.constraint import FillMasks, Grammar, TokenConstraint
from tp_engine.features.structured_output.feature import FEATURE, MASK_ROWS, MASKS
from tp_engine.plan import IntArray
from tp_engine.requests.request import FinishReason
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.outcome import FinishDetails, StepOutcome
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import RequestGroup, Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder


@dataclass(frozen=True, slots=True)
class Constrained:
    """A sequence's place in its grammar."""

    constraint: TokenConstraint


CONSTRAINED = Extension(FEATURE.name, Constrained)


def constraint_of(sequence: Sequence) -> TokenConstraint | None:
    """Return what restricts the sequence's next token; None if nothing does."""
    found = CONSTRAINED.get(sequence)
    return None if found is None else found.constraint


def accept(constraint: TokenConstraint, token_id: int, end: FinishDetails | None) -> tuple[bool, FinishDetails | None]:
    """Give a grammar its next token: whether it accepts it, and how the sequence ends; ``end``: how without a grammar.
    A token that is refused, which happens only where no token may come, ends the sequence without it.  A stop token is
    a better reason than the grammar's end."""
    is_accepted = constraint.accept(token_id)
    if is_accepted and (not constraint.is_over or (end is not None and end.reason is FinishReason.STOP)):
        return True, end
    if (error := constraint.error) is None:
        return is_accepted, FinishDetails(FinishReason.STOP, by_grammar=True)
    return is_accepted, FinishDetails(
        FinishReason.ERROR, error=error, error_code=constraint.error_code, by_grammar=True
    )


class ConstrainedRows(SchedulerFeature):
    """The constraints of a scheduler's sequences; ``fill_masks`` is for them."""

    def __init__(self, state: SchedulerState, fill_masks: FillMasks | None) -> None:
        self._state, self._rows, self._readiness = state, state.rows, state.rows.readiness
        self._fill_masks = fill_masks
        self._waiting: dict[str, RequestGroup] = {}  # for their grammars
        self._grammars: dict[str, Grammar] = {}  # of the others

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.on_add.append(self.on_add)
        hooks.on_make.append(self.on_make)
        hooks.extend_plan.append(self.extend_plan)
        hooks.on_tokens.append(self.on_tokens)
        hooks.on_request_end.append(self.on_request_end)
        hooks.check_integrity.append(self.check_integrity)

    def on_add(self, group: RequestGroup) -> None:
        if group.request.is_constrained:
            self._waiting[group.request.request_id] = group

    def on_request_end(self, group: RequestGroup) -> None:
        self._waiting.pop(group.request.request_id, None)
        self._grammars.pop(group.request.request_id, None)

    def on_make(self, sequence: Sequence) -> None:
        grammar = self._grammars.get(sequence.request_id)
        if grammar is not None:
            self._start(sequence, grammar)

    def constrain(self, request_id: str, grammar: Grammar) -> None:
        """Let the sequences of a request run: its grammar is compiled.  A request that was aborted is ignored."""
        group = self._waiting.pop(request_id, None)
        if group is not None:
            self._grammars[request_id] = grammar
            (first,) = group.sequences
            self._start(first, grammar)
            self._state.unblock(first, Blocked.GRAMMAR)

    def _start(self, sequence: Sequence, grammar: Grammar) -> None:
        constraint = grammar.start(ignore_eos=sequence.group.request.params.ignore_eos)
        sequence.extensions[CONSTRAINED.name] = Constrained(constraint)

    def extend_plan(self, builder: StepPlanBuilder) -> None:
        """Give the plan a mask for each constrained row that the step samples."""
        if not self._readiness.num_constrained:
            return
        ending = [
            sequence.row
            for sequence, count in builder.prefills
            if self._rows.num_scheduled[sequence.row] + count == self._rows.num_tokens[sequence.row]
        ]
        sampled: IntArray = np.concatenate((builder.decodes.rows, np.array(ending, dtype=np.int32)))
        rows: IntArray = sampled[self._readiness.is_constrained[sampled]]
        if not len(rows):
            return
        self._readiness.block(rows, Blocked.TOKEN)
        constraints = [constraint_of(sequence) for sequence in self._rows.row_set(rows).sequences]
        builder.extensions |= {MASK_ROWS.name: rows, MASKS.name: self.masks(constraints)}

    def masks(self, constraints: Iterable[TokenConstraint | None]) -> IntArray:
        """Return the masks (n, words) of the next tokens of these constraints."""
        assert self._fill_masks is not None, "a request has a grammar, and the scheduler got nothing that fills masks"
        return self._fill_masks([*constraints])

    def on_tokens(self, outcome: StepOutcome) -> None:
        """Give each constrained sequence's grammar its new token."""
        if not self._readiness.num_constrained:
            return
        rows = outcome.rows.rows
        self._readiness.clear(rows, Blocked.TOKEN)
        for position in np.flatnonzero(self._readiness.is_constrained[rows]).tolist():
            constraint = constraint_of(outcome.sequences[position])
            assert constraint is not None
            is_accepted, end = accept(constraint, int(outcome.token_ids[position]), outcome.endings.get(position))
            if not is_accepted:
                outcome.dropped.append(position)
            if end is not None:
                outcome.endings[position] = end

    def check_integrity(self) -> None:
        """Assert that just the rows of constrained requests have a constraint."""
        running = self._rows.running()
        assert all((constraint_of(one) is not None) == one.group.request.is_constrained for one in running)


def make(parts: SchedulerParts) -> Iterator[ConstrainedRows]:
    """Make the scheduler's half; what fills masks is given by the engine's."""
    yield ConstrainedRows(parts.state, parts.given.get(FEATURE.name))
