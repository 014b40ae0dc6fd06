"""Rows whose next token is restricted: their masks, and the tokens that these let through.

::

    constrain      the request's grammar is there: its first sequence begins with a constraint of its own
    on_make        so does each further one
    poll           the sequences go on whose masks have been found since (``Blocked.MASK``)
    extend_plan    the masks of the step's sampled rows, each of which then awaits its token (``Blocked.TOKEN``)
    on_tokens      each constraint accepts its row's token; some sequences end with it, or without it
    after_result   the masks of the others are asked for, and found by threads while this one goes on

No step waits for a mask for longer than a moment: without the rows whose masks are late it runs on.  A sequence is in
the queue, or has a row that is in a plan, only if its next mask is there, so a prompt never waits at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tp_engine.features.extension import Extension
from tp_engine.features.structured_output.constraint import Grammar, Masks, TokenConstraint
from tp_engine.features.structured_output.feature import FEATURE, MASK_ROWS, MASKS
from tp_engine.plan import IntArray
from tp_engine.requests.request import FinishReason
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.outcome import FinishDetails, StepOutcome
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import NO_ROW, RequestGroup, Sequence, SequencePhase
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


class ConstrainedRows(SchedulerFeature):
    """The constraints of a scheduler's sequences; ``masks`` finds theirs."""

    def __init__(self, state: SchedulerState, masks: Masks | None) -> None:
        self._state, self._rows, self._readiness = state, state.rows, state.rows.readiness
        self._masks = masks
        self._waiting: dict[str, RequestGroup] = {}  # for their grammars
        self._grammars: dict[str, Grammar] = {}  # of the others
        self._moved: list[Sequence] = []  # by the step's result
        self._late: dict[tuple[str, int], Sequence] = {}  # that wait for their masks

    @property
    def masks(self) -> Masks:
        """What finds masks."""
        assert self._masks is not None, "a request has a grammar, and the scheduler got nothing that finds masks"
        return self._masks

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.on_add.append(self.on_add)
        hooks.on_make.append(self.on_make)
        hooks.poll.append(self.poll)
        hooks.extend_plan.append(self.extend_plan)
        hooks.on_tokens.append(self.on_tokens)
        hooks.after_result.append(self.after_result)
        hooks.on_request_end.append(self.on_request_end)
        hooks.check_integrity.append(self.check_integrity)

    def on_add(self, group: RequestGroup) -> None:
        if group.request.is_constrained:
            self._waiting[group.request.request_id] = group

    def on_request_end(self, group: RequestGroup) -> None:
        self._waiting.pop(group.request.request_id, None)
        self._grammars.pop(group.request.request_id, None)
        for sequence in group.sequences if self._late else ():
            self._late.pop((sequence.request_id, sequence.index), None)

    def on_make(self, sequence: Sequence) -> None:
        grammar = self._grammars.get(sequence.request_id)
        if grammar is not None and not self._start(sequence, grammar):
            sequence.blocked |= Blocked.MASK

    def constrain(self, request_id: str, grammar: Grammar) -> None:
        """Let the sequences of a request run: its grammar is compiled.  A request that was aborted is ignored."""
        group = self._waiting.pop(request_id, None)
        if group is not None:
            self._grammars[request_id] = grammar
            (first,) = group.sequences
            if self._start(first, grammar):
                self._state.unblock(first, Blocked.MASK)

    def _start(self, sequence: Sequence, grammar: Grammar) -> bool:
        """Let the sequence begin with its grammar; whether its first mask is there, as it nearly always is."""
        constraint = grammar.start(ignore_eos=sequence.group.request.params.ignore_eos)
        sequence.extensions[CONSTRAINED.name] = Constrained(constraint)
        return not self._ask([sequence])

    def _ask(self, sequences: list[Sequence]) -> list[Sequence]:
        """Ask for the next masks of these sequences; those whose mask is not there yet, which is nothing new for
        ``poll``."""
        constraints = [found for one in sequences if (found := constraint_of(one)) is not None]
        self.masks.ask(constraints)
        is_ready = self.masks.is_ready
        late = [one for one, constraint in zip(sequences, constraints, strict=True) if not is_ready(constraint)]
        self._late |= {(one.request_id, one.index): one for one in late}
        return late

    def poll(self) -> None:
        """Let the sequences go on whose masks are there, after a moment's patience for the others."""
        if not self._late:
            return
        self.masks.be_patient()
        waiting = [one for one in self._late.values() if one.phase is not SequencePhase.FINISHED]
        self._late.clear()
        late = {id(one) for one in self._ask(waiting)}
        ready = [one for one in waiting if id(one) not in late]
        self._readiness.clear(_rows_of(ready), Blocked.MASK)
        for sequence in ready:
            if sequence.row == NO_ROW:
                self._state.unblock(sequence, Blocked.MASK)

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
        sequences = self._rows.row_set(rows).sequences
        constraints = [found for one in sequences if (found := constraint_of(one)) is not None]
        builder.extensions |= {MASK_ROWS.name: rows, MASKS.name: self.masks.of(constraints)}

    def on_tokens(self, outcome: StepOutcome) -> None:
        """Give each constrained sequence's grammar its new token."""
        if not self._readiness.num_constrained:
            return
        rows = outcome.rows.rows
        self._readiness.clear(rows, Blocked.TOKEN)
        for position in np.flatnonzero(self._readiness.is_constrained[rows]).tolist():
            constraint = constraint_of(outcome.sequences[position])
            assert constraint is not None
            is_accepted, end = self.accept(constraint, int(outcome.token_ids[position]), outcome.endings.get(position))
            if not is_accepted:
                outcome.dropped.append(position)
            if end is not None:
                outcome.endings[position] = end
            else:
                self._moved.append(outcome.sequences[position])

    def accept(
        self, constraint: TokenConstraint, token_id: int, end: FinishDetails | None
    ) -> tuple[bool, FinishDetails | None]:
        """Give a grammar its next token: whether it accepts it, and how the sequence ends; ``end``: how without a
        grammar.  A token that is refused, which happens only where no token may come, ends the sequence without it.  A
        stop token is a better reason than the grammar's end."""
        is_accepted = constraint.accept(token_id)
        if is_accepted and constraint.may_be_over:
            self._decide(constraint)
        if is_accepted and (not constraint.is_over or (end is not None and end.reason is FinishReason.STOP)):
            return True, end
        if (error := constraint.error) is None:
            return is_accepted, FinishDetails(FinishReason.STOP, by_grammar=True)
        return is_accepted, FinishDetails(
            FinishReason.ERROR, error=error, error_code=constraint.error_code, by_grammar=True
        )

    def _decide(self, constraint: TokenConstraint) -> None:
        """Find out whether the constraint is over, if its mask is there in a moment; if not, the next token will be
        refused.  A copy is asked, as the constraint itself may be given another token in this step."""
        if constraint.is_quick and not self.masks.is_ready(constraint):
            copy = constraint.copy()
            self.masks.ask([copy])
            self.masks.be_patient()
        if self.masks.is_ready(constraint):
            constraint.decide()

    def after_result(self) -> None:
        """Ask for the masks after the step's tokens."""
        if self._moved:
            moved = [one for one in self._moved if one.phase is not SequencePhase.FINISHED]
            self._moved.clear()
            self._readiness.block(_rows_of(self._ask(moved)), Blocked.MASK)

    def check_integrity(self) -> None:
        """Assert that just the rows of constrained requests have a constraint."""
        running = self._rows.running()
        assert all((constraint_of(one) is not None) == one.group.request.is_constrained for one in running)
        late = [one for one in self._late.values() if one.row != NO_ROW]
        assert all(self._readiness.has(one.row, Blocked.MASK) for one in late)
        assert np.count_nonzero(self._readiness.bits & Blocked.MASK.value) == len(late)


def _rows_of(sequences: list[Sequence]) -> IntArray:
    return np.array([one.row for one in sequences if one.row != NO_ROW], dtype=np.int32)


def make(parts: SchedulerParts) -> Iterator[ConstrainedRows]:
    """Make the scheduler's half; what finds masks is given by the engine's."""
    yield ConstrainedRows(parts.state, parts.given.get(FEATURE.name))
