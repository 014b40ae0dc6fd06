"""Who enters the batch: hits, forks, and the reasons to wait."""

from __future__ import annotations

import enum
import time

from tp_engine.plan import Admission
from tp_engine.sched.batch import Batch
from tp_engine.sched.block_manager import Hits
from tp_engine.sched.draft import StepDraft
from tp_engine.sched.sequence import Phase, Sequence

#: Candidates that may be passed over in one step; bounds the work of a step, however many wait for one prompt.
_MAX_DEFERRED = 32


class Verdict(enum.Enum):
    """What became of a candidate: it entered, it lets others pass, or nobody behind it may enter."""

    ENTERED = enum.auto()
    DEFERRED = enum.auto()
    NO_ROOM = enum.auto()


class Admitter:
    """Fills the rest of a step from the queue, strictly in order but for those that wait for a sibling's prompt."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rows = batch.rows
        self._blocks = batch.blocks

    def admit(self, draft: StepDraft) -> None:
        """Admit while budget, rows and blocks last."""
        deferred: list[Sequence] = []
        while draft.budget > 0 and self._rows.has_vacancy and len(deferred) < _MAX_DEFERRED:
            sequence = self._batch.waiting.pop()
            if sequence is None:
                break
            verdict = self._consider(draft, sequence)
            if verdict is Verdict.ENTERED:
                continue
            deferred.append(sequence)
            if verdict is Verdict.NO_ROOM:
                break
        for sequence in deferred:
            self._batch.waiting.push(sequence)

    def _consider(self, draft: StepDraft, sequence: Sequence) -> Verdict:
        donor = self._donor(sequence)
        if donor is not None:
            return self._fork(draft, sequence, donor)
        if self._donor_is_coming(sequence):
            return Verdict.DEFERRED
        return self._enter(draft, sequence, self._blocks.find_hits(sequence))

    def _enter(self, draft: StepDraft, sequence: Sequence, hits: Hits) -> Verdict:
        num_shared = len(hits.blocks)
        end = min(len(sequence.token_ids), hits.num_tokens + draft.budget)
        reach = len(sequence.token_ids) + 1 if sequence.num_preemptions else end
        if not self._has_room(self._blocks.blocks_for(reach) - num_shared + self._blocks.num_idle(hits.blocks)):
            return Verdict.NO_ROOM
        self._batch.enter(sequence, draft.step_id, hits.blocks, hits.num_tokens, end)
        self._blocks.start_chain(sequence, num_shared)
        if hits.tail is not None:
            self._copy(draft, hits.tail, sequence, num_shared)
        self._count_hits(sequence, hits.num_tokens)
        self._draft_admission(draft, sequence, hits.num_tokens, end)
        return Verdict.ENTERED

    def _fork(self, draft: StepDraft, sequence: Sequence, donor: Sequence) -> Verdict:
        """Share the donor's full blocks before the last prompt token; copy the one that token falls into."""
        if not self._has_room(1):
            return Verdict.NO_ROOM
        num_computed = sequence.num_prompt_tokens - 1
        num_shared, num_in_last = divmod(num_computed, self._blocks.block_size)
        donor_table = self._blocks.table(donor.row).tolist()
        self._batch.enter(sequence, draft.step_id, donor_table[:num_shared], num_computed, num_computed + 1)
        self._blocks.start_chain(sequence, 0)
        sequence.num_cached_tokens = sequence.group.sequences[0].num_cached_tokens
        if num_in_last:
            self._copy(draft, donor_table[num_shared], sequence, num_shared)
        self._draft_admission(draft, sequence, num_computed, num_computed + 1)
        return Verdict.ENTERED

    def _copy(self, draft: StepDraft, source: int, sequence: Sequence, index: int) -> None:
        """The sequence's block number ``index`` begins as a copy of ``source``, unless it took that very block."""
        own = int(self._rows.block_table[sequence.row, index])
        if own != source:
            draft.copies.append((source, own))

    def _draft_admission(self, draft: StepDraft, sequence: Sequence, start: int, end: int) -> None:
        if not sequence.first_scheduled_s:
            sequence.first_scheduled_s = time.monotonic()
        draft.admitted.append(
            Admission(
                row=sequence.row,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=start,
                block_ids=self._blocks.table(sequence.row),
                sampling=sequence.sampling,
            )
        )
        draft.add_prefill(sequence, end - start)
        self._blocks.publish(sequence, end)

    def _donor(self, sequence: Sequence) -> Sequence | None:
        """A running sibling that has computed all that a fork shares, or will have once the plans before this ran."""
        if not self._can_fork(sequence):
            return None
        shared = sequence.num_prompt_tokens - 1
        ready = (other for other in sequence.group.running if self._rows.num_scheduled[other.row] >= shared)
        return next(ready, None)

    def _donor_is_coming(self, sequence: Sequence) -> bool:
        """Some sibling is computing the prompt: it needs no help, and will either finish it or leave its row."""
        return self._can_fork(sequence) and any(other.phase is Phase.PREFILL for other in sequence.group.running)

    @staticmethod
    def _can_fork(sequence: Sequence) -> bool:
        return len(sequence.token_ids) == sequence.num_prompt_tokens and not sequence.wants_prompt_logprobs

    def _has_room(self, num_blocks: int) -> bool:
        """Whether that many blocks can go without starving the running rows, which take this many per step."""
        running = self._rows.num_running
        return num_blocks + running // self._blocks.block_size <= self._blocks.num_available or running == 0

    def _count_hits(self, sequence: Sequence, num_hit_tokens: int) -> None:
        counters = self._batch.counters
        if sequence.num_preemptions:
            counters.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_hit_tokens)
            sequence.num_lost_tokens = 0
        else:
            counters.num_prefix_query_tokens += len(sequence.token_ids)
            counters.num_prefix_hit_tokens += num_hit_tokens
            sequence.num_cached_tokens = num_hit_tokens
