"""Speculation that changes no token: draft tokens of a row's next tokens, of which one step verifies several.

A sampled token is a function of the tokens before it, its position and the row's parameters; noise too (``noise``).  So
the step computes the row as always, and beside it a *draft row* (``feature.py``) for each draft token, which samples
the token after::

                 position   reads                     samples
    row          p          the last known token      s0        right in any case
    draft row 0       p + 1      draft token 0                   s1        right if draft token 0 is s0
    draft row 1       p + 2      draft token 1                   s2        right if so, and draft token 1 is s1

What is kept is the run up to the first token that a draft token does not equal: what steps of one token would have
given.

::

    Scheduler.schedule   must_wait -> wants_step -> StepScheduler -> extend_plan -> StepPlan with draft rows
    Scheduler.update     on_result: judge -> (the rows' own tokens are entered as always) -> extend_output
    the next plan        finish_plan: what the ranks must know of the tokens kept

Draft tokens need the last token, so a plan that may have some is not sent ahead of a result.  A step has at most
``max_step_rows`` decodes with its draft tokens, as many as pay by the times that were measured (``step_costs.py``);
where the rows alone are more than half of that, or than those times say, there are none, and plans go ahead as without
speculation.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import numpy as np

from tp_engine.features.registry import find_half
from tp_engine.features.speculation.feature import (
    BASE_ROWS,
    COUNTERS,
    DRAFT_TOKENS,
    KEPT_ROWS,
    KEPT_TOKENS,
    LIMITS,
    NUM_DRAFTS,
    TALLY,
    DraftTally,
    SpeculationCounters,
    SpeculationLimits,
)
from tp_engine.features.speculation.proposer import Proposer
from tp_engine.features.speculation.proposers import DraftPart, Proposers, make_source
from tp_engine.features.speculation.step_costs import StepCosts
from tp_engine.features.structured_output.constraint import TokenConstraint, follow, masks_of
from tp_engine.features.structured_output.feature import MASK_ROWS, MASKS
from tp_engine.features.structured_output.scheduling import ConstrainedRows, constraint_of
from tp_engine.plan import NO_IDS, IntArray, StepPlan, StepResult, TokenLogprobs
from tp_engine.requests.request import SequenceDelta, StepOutput
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.outcome import FinishDetails, StopChecker, ending, slice_logprobs
from tp_engine.sched.running_batch import RunningBatch
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder


class DraftRun(msgspec.Struct, gc=False):
    """The draft rows of a row in a step, from the ``first`` on: ``tokens`` (n,) are their draft tokens, by the sources
    of ``parts``.  Of a row with a grammar, ``masks`` (n, words) are what it allows there, and ``places`` its copies
    after the draft tokens, while which are there their masks are known.  Once the result of the step ``step_id`` is
    there, ``kept`` (a,) are the tokens after the row's own that were sampled right, with their ``logprobs``."""

    row: int
    tokens: IntArray
    parts: list[DraftPart]
    masks: IntArray | None = None
    places: list[TokenConstraint] = []
    first: int = 0
    kept: IntArray = NO_IDS
    logprobs: TokenLogprobs | None = None
    step_id: int = 0


class Speculation(SchedulerFeature):
    """The scheduler's draft tokens.  ``sources`` replace those of the configuration, for tests."""

    def __init__(
        self,
        sizes: SpeculationLimits,
        state: SchedulerState,
        stops: StopChecker,
        constrained: ConstrainedRows | None = None,
        sources: Iterable[Proposer] | None = None,
    ) -> None:
        config = sizes.config
        self.most_tokens = config.num_speculative_tokens
        self._costs = StepCosts(sizes.decode_seconds, sizes.draft_seconds) if sizes.decode_seconds else None
        self._most_rows = 1 + state.limits.num_spare_rows
        self._most_decodes = self._most_rows // 2
        if self._costs is not None:
            self._most_decodes = min(self._most_decodes, self._costs.most_decodes)
        self._state = state
        self._rows: RunningBatch = state.rows
        self._stops, self._constrained = stops, constrained
        self.sources = Proposers([make_source(config)] if sources is None else sources, self.most_tokens)
        self._num_drafts = self.most_tokens if self.sources.has_head else 0
        self._found: list[DraftRun] = []
        self._verifying: list[DraftRun] = []
        self._kept: list[DraftRun] = []
        self._judged: list[DraftRun] = []
        self._ended: dict[tuple[str, int], DraftTally] = {}  # by the step's result, with the row's own token
        self.counters = SpeculationCounters(accepted_at=[0] * self.most_tokens)

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.must_wait.append(self.must_wait)
        hooks.wants_step.append(self.wants_step)
        hooks.extend_plan.append(self.extend_plan)
        hooks.finish_plan.append(self.finish_plan)
        hooks.on_result.append(self.on_result)
        hooks.extend_output.append(self.extend_output)
        hooks.on_end.append(self.on_end)
        hooks.stats.append(self.stats)

    def stats(self) -> dict[str, SpeculationCounters]:
        """Return a copy of the counters."""
        own = self.counters
        copy = replace(own, accepted_at=own.accepted_at.copy(), by_source=self.sources.counts.copy())
        return {COUNTERS.name: copy}

    def must_wait(self) -> bool:
        """Return whether the next plan may have draft tokens, or a step in flight has some."""
        if self._verifying:
            return True
        return 0 < len(self._rows.decoding().rows) <= self._most_decodes

    def wants_step(self) -> bool:
        """Draft for the step to be scheduled; whether there is anything to verify."""
        self._found.clear()
        chosen = self._rows.ready_decodes()
        if not 0 < len(chosen.rows) <= self._most_decodes:
            return False
        runs: list[DraftRun] = []
        likelihoods: list[float] = []
        for row, sequence in zip(chosen.rows.tolist(), chosen.sequences, strict=True):
            known = int(self._rows.num_tokens[row])
            most = min(self.most_tokens, sequence.max_total_tokens - known - 1)
            if most < 1:
                continue
            found = self.sources.propose(sequence, self._rows.tokens[row, :known], most)
            if len(found.tokens):
                runs.append(DraftRun(row, found.tokens, found.parts))
                likelihoods += found.likelihoods
        runs = self._likeliest(runs, likelihoods, len(chosen.rows))
        if self._rows.readiness.num_constrained:
            runs = self._allowed(runs)
        self._found += runs
        return bool(self._found)

    def _likeliest(self, runs: list[DraftRun], likelihoods: list[float], num_decodes: int) -> list[DraftRun]:
        """The likeliest tokens of all runs, as many as the budget allows and as pay: a part of each run from its begin
        on, as likelihoods fall."""
        found = np.array(likelihoods)
        best = np.argsort(-found, kind="stable")[: self._most_rows - num_decodes]
        if self._costs is not None:
            best = best[: self._costs.num_paying(num_decodes, found[best])]
        if len(best) < len(found):
            owners = np.repeat(np.arange(len(runs)), [len(run.tokens) for run in runs])
            counts = np.bincount(owners[best], minlength=len(runs)).tolist()
            for run, count in zip(runs, counts, strict=True):
                run.tokens = run.tokens[:count]
        return [run for run in runs if len(run.tokens)]

    def _allowed(self, runs: list[DraftRun]) -> list[DraftRun]:
        """``runs`` up to the first draft token that the row's grammar refuses, or whose mask is late, with their
        masks."""
        free, constrained, places = list[DraftRun](), list[DraftRun](), list[list[TokenConstraint]]()
        for run in runs:
            sequence = self._rows.sequences[run.row]
            assert sequence is not None, "a vacant row has draft tokens"
            if (constraint := constraint_of(sequence)) is None:
                free.append(run)
            elif copies := follow(constraint, run.tokens.tolist()):
                constrained.append(run)
                places.append(copies)
        if not constrained:
            return free
        assert self._constrained is not None, "a request has a grammar, and nothing finds masks"
        for run, copies, masks in zip(constrained, places, masks_of(places, self._constrained.masks), strict=True):
            run.tokens, run.masks, run.places = run.tokens[: len(masks)], masks, copies[: len(masks)]
        return free + [run for run in constrained if len(run.tokens)]

    def extend_plan(self, builder: StepPlanBuilder) -> None:
        """Give the rows that run in this step draft rows for what was found, as far as tokens and blocks are left.
        With its draft rows a step has at most ``max_step_decodes`` rows: a rank's inputs have room for no more."""
        if not self._found or not builder.may_preempt:
            return
        decoding = set(builder.decodes.rows.tolist())
        limits = self._state.limits
        num_left = min(limits.max_step_decodes - len(decoding) - len(builder.prefills), limits.num_spare_rows)
        self._verifying, first = [], 0
        for run in self._found:
            room = min(self._room(builder, run), builder.budget, num_left - first) if run.row in decoding else 0
            if room > 0:
                run.tokens, run.first = run.tokens[:room], first
                first += len(run.tokens)
                builder.budget -= len(run.tokens)
                self._verifying.append(run)
        self._found.clear()
        self._rows.end_run()

    def _room(self, builder: StepPlanBuilder, run: DraftRun) -> int:
        """Draft tokens for which the row has slots after that of its own token; it gets free blocks for them, and for
        what the ranks draft after them."""
        blocks, row = self._state.blocks, run.row
        end = int(self._rows.num_scheduled[row]) + 1
        room = min(end + len(run.tokens) + self._num_drafts, int(self._rows.max_total_tokens[row]))
        count = blocks.blocks_for(room) - int(self._rows.num_blocks[row])
        if count > 0 and row not in builder.block_rows and blocks.has_room(count * blocks.num_groups):
            builder.add_blocks(np.full(count, row, dtype=np.int32), blocks.grow(row, count))
        return int(self._rows.capacity[row]) - end

    def on_result(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Judge the draft tokens of a step; return its plan and result as if it had had none."""
        self._ended.clear()
        self.sources.take(result)
        num_draft_rows = len(BASE_ROWS.of(plan))
        if not num_draft_rows:
            return plan, result
        self._judged, self._verifying = self._verifying, []
        first, sampled, logprobs = len(plan.decode_rows) - num_draft_rows, result.token_ids, result.logprobs
        own = dict(zip(plan.decode_rows[:first].tolist(), sampled[:first].tolist(), strict=True))
        for run in self._judged:
            begin = first + run.first
            behind = sampled[begin : begin + len(run.tokens)]
            before = np.concatenate(([own[run.row]], behind[:-1]))
            num_right = int((run.tokens == before).cumprod().sum())
            run.kept, run.step_id = behind[:num_right].copy(), plan.step_id
            if logprobs is not None:
                run.logprobs = slice_logprobs(logprobs, begin, begin + num_right, logprobs.token_ids.shape[1] - 1)
            self._count(run)
        draft_rows = slice(first, first + num_draft_rows)
        others = {name: one for name, one in plan.extensions.items() if name not in (BASE_ROWS.name, DRAFT_TOKENS.name)}
        if logprobs is not None:
            logprobs = TokenLogprobs(
                token_ids=np.delete(logprobs.token_ids, draft_rows, axis=0),
                logprobs=np.delete(logprobs.logprobs, draft_rows, axis=0),
                ranks=np.delete(logprobs.ranks, draft_rows),
            )
        return (
            msgspec.structs.replace(plan, decode_rows=plan.decode_rows[:first], extensions=others),
            msgspec.structs.replace(result, token_ids=np.delete(sampled, draft_rows), logprobs=logprobs),
        )

    def _count(self, run: DraftRun) -> None:
        num_tokens, num_right, counters = len(run.tokens), len(run.kept), self.counters
        self.sources.note(run.parts, num_tokens, num_right)
        counters.num_drafts += 1
        counters.num_draft_tokens += num_tokens
        counters.num_accepted_tokens += num_right
        for place in range(num_right):
            counters.accepted_at[place] += 1
        if (sequence := self._occupant(run)) is not None:
            tally = TALLY.of(sequence)
            tally.num_draft_tokens += num_tokens
            tally.num_accepted_tokens += num_right

    def _occupant(self, run: DraftRun) -> Sequence | None:
        """The sequence that ``run`` was for, if it still has its row."""
        return self._rows.sequences[run.row] if self._rows.since_step[run.row] <= run.step_id else None

    def extend_output(self, output: StepOutput) -> list[Sequence]:
        """Enter the tokens after the rows' own, with a record for each row, and the tallies of those that have ended
        with their own."""
        for delta in output.deltas if self._ended else ():
            if (tally := self._ended.get((delta.request_id, delta.index))) is not None:
                tally.enter(delta)
        judged, self._judged = self._judged, []
        if not judged:
            return []
        ended: list[Sequence] = []
        for run in judged:
            sequence = self._occupant(run)
            if not len(run.kept) or sequence is None:
                continue
            end = self._cut(run, sequence)
            self._rows.extend(run.row, run.kept)
            asked = int(self._rows.num_logprobs[run.row])
            logprobs = None
            if asked >= 0 and run.logprobs is not None:
                logprobs = slice_logprobs(run.logprobs, 0, len(run.kept), asked)
            delta = SequenceDelta(
                request_id=sequence.request_id,
                index=sequence.index,
                new_token_ids=run.kept.tolist(),
                logprobs=logprobs,
                first_scheduled_s=sequence.first_scheduled_s,
            )
            TALLY.of(sequence).enter(delta)
            if end is None:
                self._kept.append(run)
            else:
                end.enter(delta)
                ended.append(sequence)
            output.deltas.append(delta)
        self._rows.end_run()
        return ended

    def _cut(self, run: DraftRun, sequence: Sequence) -> FinishDetails | None:
        """How the sequence, whose grammar accepts what is kept, ends within ``run.kept``, if it does; what is after
        the end is cut off."""
        known, constraint, is_accepted = int(self._rows.num_tokens[run.row]), constraint_of(sequence), True
        may_end = self._stops.may_stop(run.kept) | (constraint is not None)
        may_end[-1] = True
        for place in np.flatnonzero(may_end).tolist():
            token_id = int(run.kept[place])
            end = ending(sequence, token_id, known + place + 1, sequence.max_total_tokens)
            if constraint is not None and self._constrained is not None:
                is_accepted, end = self._constrained.accept(constraint, token_id, end)
            if end is not None:
                run.kept = run.kept[: place + is_accepted]
                return end
        return None

    def on_end(self, sequence: Sequence) -> None:
        """Learn from the sequence, for drafts of later requests; its last record is still to come."""
        if (tally := TALLY.get(sequence)) is not None:
            self._ended[sequence.request_id, sequence.index] = tally
        self.sources.learn(sequence)

    def finish_plan(self, plan: StepPlan) -> StepPlan:
        """Return the next plan: it begins with the tokens that were kept since the last one, has the draft rows, and
        asks for drafts if the rows of the step after it may have draft tokens."""
        if self._num_drafts:
            num_sampled = len(plan.decode_rows) + int(plan.prefill_samples.sum())
            if 0 < num_sampled <= self._most_decodes:
                likelihoods = self.sources.head_likelihoods()
                count = len(likelihoods) if self._costs is None else self._costs.num_drafts(num_sampled, likelihoods)
                plan = plan.extended({NUM_DRAFTS.name: count}) if count else plan
        if self._verifying:
            plan = self._with_draft_rows(plan)
        if not self._kept:
            return plan
        kept, self._kept = self._kept, []
        kept_rows = np.repeat([run.row for run in kept], [len(run.kept) for run in kept]).astype(np.int32)
        kept_tokens = np.concatenate([run.kept for run in kept])
        plan = plan.extended({KEPT_ROWS.name: kept_rows, KEPT_TOKENS.name: kept_tokens})
        return msgspec.structs.replace(plan, state_copies=self._with_states(plan.state_copies, kept))

    def _with_draft_rows(self, plan: StepPlan) -> StepPlan:
        """The plan with the draft rows after its decodes, and their masks; its set of rows is this step's alone."""
        runs, first = self._verifying, np.int32(self._state.limits.max_num_seqs)
        base_rows = np.repeat([run.row for run in runs], [len(run.tokens) for run in runs]).astype(np.int32)
        draft_rows = np.arange(len(base_rows), dtype=np.int32) + first
        mask_rows, masks = [MASK_ROWS.of(plan)], [MASKS.of(plan)]
        for run in runs:
            if run.masks is not None:
                mask_rows.append(draft_rows[run.first : run.first + len(run.tokens)])
                masks.append(run.masks[: len(run.tokens)])
        if len(masks) > 1:
            plan = plan.extended({MASK_ROWS.name: np.concatenate(mask_rows), MASKS.name: np.concatenate(masks)})
        decode_rows = np.concatenate((plan.decode_rows, draft_rows))
        plan = msgspec.structs.replace(plan, rows_epoch=0, decode_rows=decode_rows)
        draft_tokens = np.concatenate([run.tokens for run in runs])
        return plan.extended({BASE_ROWS.name: base_rows, DRAFT_TOKENS.name: draft_tokens})

    def _with_states(self, copies: IntArray, kept: list[DraftRun]) -> IntArray:
        """``copies`` and, where there are recurrent states, those after the rows' last kept tokens.

        A row that was left since then may have an occupant already, whose state this plan copies there."""
        limits = self._state.limits
        if not limits.has_states:
            return copies
        living = [run for run in kept if self._occupant(run) is not None]
        pairs = [(limits.max_num_seqs + run.first + len(run.kept) - 1, run.row) for run in living]
        found = np.concatenate((copies, np.array(pairs, dtype=np.int32).reshape(-1, 2)))
        assert len(np.unique(found[:, 1])) == len(found), f"two states for one row: {found.tolist()}"
        return found


def make(parts: SchedulerParts) -> Iterator[Speculation]:
    """Make the scheduler's half if there is a way to draft; proposers that are ``given`` replace its own."""
    sizes = LIMITS.get(parts.state.limits)
    if sizes is not None:
        constrained = find_half(parts.features, ConstrainedRows)
        yield Speculation(sizes, parts.state, parts.stops, constrained, parts.given.get("speculation"))
