"""A worker without a model, which proves that a scheduler's plans are right.

It applies plans exactly as a rank does.  For each slot of a fake KV cache it keeps the token stored there, the group of
layers that stored it, and a hash of the whole sequence up to it.  In each step every row must find its own history in
the slots of each group, as far back as that group's window and the tile before it reach, after any sharing, copying,
release, eviction or recomputation.  The next token is computed from what the *cache* holds in the windows of all
groups, so a wrong block also gives wrong tokens; ``expected_tokens`` computes them from the sequence alone.

A recurrent state is the hash of all tokens that went into it.  It must be that after the tokens before a chunk.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_engine.features.kv_events.scheduling import KVEventSink
from tp_engine.features.lora.feature import AdapterSlots
from tp_engine.features.speculation.feature import (
    BASE_ROWS,
    DRAFT_TOKENS,
    KEPT_ROWS,
    KEPT_TOKENS,
    SpeculationLimits,
    draft_rows,
)
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.speculation.proposer import Proposer
from tp_engine.features.tiers.feature import LIMITS, TierLimits
from tp_engine.plan import StepPlan, StepResult
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits

VOCABULARY = 50
EOS = 7
_MODULUS = (1 << 61) - 1
_FACTORS = np.array([(i * 2_654_435_761) % 1_000_003 + 1 for i in range(4096)], dtype=np.int64)


def chain_hashes(token_ids: list[int], start: list[int]) -> list[int]:
    """Hashes of all prefixes that end at or after position ``len(start)``, given the hashes before."""
    value = start[-1] if start else 1
    found = []
    for token_id in token_ids[len(start) :]:
        value = (value * 1_000_003 + token_id + 1) % _MODULUS
        found.append(value)
    return found


def next_token(seen: list[npt.NDArray[np.int64]], length: int, seed: int) -> int:
    """The fake model after ``length`` tokens.  The result depends on the last token, on ``seen`` in each group, on
    their positions, and on the row's seed."""
    total = 7919 * (seed % 1009)
    for group, tokens in enumerate(seen):
        total += (group + 1) * int((tokens * _FACTORS[length - len(tokens) : length]).sum())
    return total % VOCABULARY


def visible(tokens: Sequence[int], windows: Sequence[int | None]) -> list[npt.NDArray[np.int64]]:
    """What the last of ``tokens`` sees in each group."""
    return [np.array(tokens[-(window or len(tokens)) :], dtype=np.int64) for window in windows]


def expected_tokens(
    prompt: list[int],
    seed: int,
    max_length: int,
    stop_ids: frozenset[int],
    windows: Sequence[int | None] = (None,),
) -> list[int]:
    """What the fake model generates from ``prompt`` up to a stop or ``max_length`` tokens in all."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(next_token(visible(tokens, windows), len(tokens), seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeRow:
    """A worker's state of one row; each entry of ``table`` has the blocks of all groups."""

    token_ids: list[int]
    chain: list[int]
    computed: int
    table: list[list[int]]
    seed: int


@dataclass
class FakeWorker:
    """Rows and KV cache of one rank."""

    limits: SchedulerLimits
    rows: dict[int, FakeRow] = field(default_factory=dict)
    num_computed_tokens: int = 0
    last_step_id: int = 0
    epochs: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_slots = self.limits.num_blocks * self.limits.block_size
        self.kv_token = np.full(num_slots, -1, dtype=np.int64)
        self.kv_chain = np.full(num_slots, -1, dtype=np.int64)
        self.kv_group = np.full(num_slots, -1, dtype=np.int64)

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply a plan in the documented order; assert that it is valid and leaves every row intact."""
        assert plan.step_id == self.last_step_id + 1
        self.last_step_id = plan.step_id
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert plan.num_tokens or len(plan.encodes), "a plan that does nothing"
        assert len(plan.decode_rows) + len(plan.prefill_rows) <= self.limits.max_step_decodes
        self._keep(plan)
        self._apply_rows(plan)
        self._copy(plan)
        num_rows = len(plan.decode_rows) - len(BASE_ROWS.of(plan))
        assert draft_rows(plan).tolist() == [self.limits.max_num_seqs + i for i in range(len(BASE_ROWS.of(plan)))]
        decode_rows = plan.decode_rows[:num_rows].tolist()
        scheduled = [(row, 1) for row in decode_rows]
        if plan.rows_epoch:
            known = self.epochs.setdefault(plan.rows_epoch, plan.decode_rows.tolist())
            assert known == plan.decode_rows.tolist(), f"epoch {plan.rows_epoch} has two sets of rows"
        for row in decode_rows:
            assert self.rows[row].computed == len(self.rows[row].token_ids) - 1, "a decode is one token from its end"
        scheduled += zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), strict=True)
        assert len({row for row, _ in scheduled}) == len(scheduled), "a row is scheduled twice"
        starts = {number: row.computed for number, row in self.rows.items()}
        self._store(scheduled)
        for number, row in self.rows.items():
            self._check_history(row, starts[number])
        behind = self._verify(plan)
        sampled = self._sample(plan)
        token_ids = np.concatenate((sampled[:num_rows], behind, sampled[num_rows:])).astype(np.int32)
        return StepResult(step_id=plan.step_id, token_ids=token_ids)

    def _keep(self, plan: StepPlan) -> None:
        """Tokens that an earlier step verified: their predecessor's keys are in the row's slots already."""
        for number, token_id in zip(KEPT_ROWS.of(plan).tolist(), KEPT_TOKENS.of(plan).tolist(), strict=True):
            row = self.rows[number]
            row.computed += 1
            for group in range(self.limits.num_groups):
                last = self._slots(row, group, row.computed - 1)
                assert self.kv_chain[last].tolist() == row.chain[row.computed - 1 : row.computed], "kept, not stored"
            row.token_ids.append(token_id)
            row.chain += chain_hashes(row.token_ids, row.chain)

    def _verify(self, plan: StepPlan) -> list[int]:
        """Store each draft row's draft token after its row, and sample what follows it."""
        found: list[int] = []
        draft_tokens: dict[int, list[int]] = {}
        of_step = zip(
            draft_rows(plan).tolist(), BASE_ROWS.of(plan).tolist(), DRAFT_TOKENS.of(plan).tolist(), strict=True
        )
        for place, number, token_id in of_step:
            row, own = self.rows[number], draft_tokens.setdefault(number, [])
            own.append(token_id)
            token_ids = [*row.token_ids, *own]
            chain = chain_hashes(token_ids, row.chain)
            draft_row = FakeRow(token_ids, [*row.chain, *chain], len(token_ids), row.table, row.seed)
            assert draft_row.computed <= len(row.table) * self.limits.block_size, "a draft row without a slot"
            for group in range(self.limits.num_groups):
                slots = self._slots(draft_row, group, draft_row.computed - 1)
                self.kv_token[slots], self.kv_chain[slots], self.kv_group[slots] = token_id, draft_row.chain[-1], group
            self.states[place] = draft_row.chain[-1]
            found.append(self._sample_lane(plan, place, draft_row))
        return found

    def _sample_lane(self, plan: StepPlan, place: int, draft_row: FakeRow) -> int:
        return next_token(self._seen(draft_row), draft_row.computed, draft_row.seed)

    def _apply_rows(self, plan: StepPlan) -> None:
        for row in plan.released.tolist():
            del self.rows[row]
        for admission in plan.admitted:
            assert 0 <= admission.row < self.limits.max_num_seqs and admission.row not in self.rows
            tokens = admission.token_ids.tolist()
            assert admission.num_computed_tokens < len(tokens)
            self.rows[admission.row] = FakeRow(
                tokens,
                chain_hashes(tokens, []),
                admission.num_computed_tokens,
                self._by_group(admission.block_ids),
                admission.sampling.seed,
            )
        for row, blocks in zip(plan.block_rows.tolist(), self._by_group(plan.block_ids), strict=True):
            self.rows[row].table.append(blocks)

    def _by_group(self, block_ids: npt.NDArray[np.int32]) -> list[list[int]]:
        assert np.all((block_ids >= 0) & (block_ids < self.limits.num_blocks))
        blocks: list[list[int]] = block_ids.reshape(-1, self.limits.num_groups).tolist()
        return blocks

    def _copy(self, plan: StepPlan) -> None:
        """All copies at once, as a rank does."""
        assert len(set(plan.copies[:, 1].tolist())) == len(plan.copies), "a block is the target of two copies"
        assert len(set(plan.state_copies[:, 1].tolist())) == len(plan.state_copies), (
            "a slot is the target of two copies"
        )
        assert self.limits.has_states or not len(plan.state_copies)
        copied = {target: self.states[source] for source, target in plan.state_copies.tolist()}
        first, behind = self.limits.max_num_seqs, self.limits.max_num_seqs + self.limits.num_spare_rows
        assert not any(first <= target < behind for target in copied), "a state is copied to a draft row"
        self.states |= copied
        for cache in (self.kv_token, self.kv_chain, self.kv_group):
            blocks = cache.reshape(self.limits.num_blocks, self.limits.block_size)
            blocks[plan.copies[:, 1]] = blocks[plan.copies[:, 0]]

    def _store(self, scheduled: list[tuple[int, int]]) -> None:
        written: set[int] = set()
        for number, count in scheduled:
            row = self.rows[number]
            start, row.computed = row.computed, row.computed + count
            assert count > 0 and row.computed <= len(row.token_ids)
            if self.limits.has_states:
                assert not start or self.states[number] == row.chain[start - 1], f"row {number} has another state"
                self.states[number] = row.chain[row.computed - 1]
            for group in range(self.limits.num_groups):
                slots = self._slots(row, group, start)
                assert written.isdisjoint(slots.tolist()), "a slot is written twice"
                written.update(slots.tolist())
                self.kv_token[slots] = row.token_ids[start : row.computed]
                self.kv_chain[slots] = row.chain[start : row.computed]
                self.kv_group[slots] = group
            self.num_computed_tokens += count

    def _check_history(self, row: FakeRow, start: int) -> None:
        """Every slot that a query at ``start`` or later may read belongs to this row."""
        for group, window in enumerate(self.limits.windows):
            visible = 0 if window is None else max(0, start - window + 1)
            first = visible // self.limits.tile_tokens * self.limits.tile_tokens
            slots = self._slots(row, group, first)
            assert self.kv_chain[slots].tolist() == row.chain[first : row.computed], "a row lost its history"
            assert np.all(self.kv_group[slots] == group), "a row reads what another group of layers stored"

    def _sample(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        for number, samples in zip(plan.prefill_rows.tolist(), plan.prefill_samples.tolist(), strict=True):
            row = self.rows[number]
            assert samples == (row.computed == len(row.token_ids)), "sampled exactly at the end of the known tokens"
        sampled = [self.rows[row] for row in plan.sampled_rows.tolist() if row < self.limits.max_num_seqs]
        for row in sampled:
            row.token_ids.append(next_token(self._seen(row), row.computed, row.seed))
            row.chain += chain_hashes(row.token_ids, row.chain)
        return np.array([row.token_ids[-1] for row in sampled], dtype=np.int32)

    def _seen(self, row: FakeRow) -> list[npt.NDArray[np.int64]]:
        """In each group, the tokens that the cache holds in the window of a row's last query."""
        firsts = [0 if window is None else max(0, row.computed - window) for window in self.limits.windows]
        return [self.kv_token[self._slots(row, group, first)] for group, first in enumerate(firsts)]

    def _slots(self, row: FakeRow, group: int, first: int) -> npt.NDArray[np.int64]:
        """The slots of the computed positions from ``first`` on."""
        positions, size = np.arange(first, row.computed), self.limits.block_size
        table = np.array(row.table, dtype=np.int64)[:, group]
        return table[positions // size] * size + positions % size


@dataclass
class Output:
    """What one sequence has received."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    deltas: list[SequenceDelta] = field(default_factory=list)


class Simulation:
    """A scheduler and its fake worker; with ``checks``, ``check_integrity`` runs after each act of 20 of 80 plans.

    It does not run after all acts, because a check enters what steady steps have only noted.  ``ahead`` plans are made
    before the oldest one runs.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        ahead: int = 0,
        checks: bool = True,
        proposer: Proposer | None = None,
        kv_events: KVEventSink | None = None,
    ) -> None:
        self.limits = limits
        self.ahead = ahead
        self.checks = checks
        self.in_flight: deque[StepPlan] = deque()
        self.kv_events = kv_events
        self.scheduler = Scheduler(
            limits, given={"speculation": None if proposer is None else [proposer], "kv_events": kv_events}
        )
        self.worker = FakeWorker(limits)
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[tuple[str, int], Output] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        prompt: list[int],
        *,
        request_id: str | None = None,
        priority: int = 0,
        will_continue: bool = False,
        **params: object,
    ) -> EngineRequest:
        """Queue a request, with a seed of its own unless one is given."""
        request_id = request_id or f"r{len(self.requests)}"
        params.setdefault("seed", len(self.requests))
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),  # type: ignore[arg-type]
            eos_token_ids=(EOS,),
            priority=priority,
            will_continue=will_continue,
        )
        self.add_request(request)
        return request

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request as it is."""
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs.update({(request.request_id, index): Output() for index in range(request.params.n)})
        self._check()

    def abort(self, *request_ids: str) -> None:
        """Abort, and note the outputs that end."""
        self._take(self.scheduler.abort(request_ids))
        self._check()

    def step(self, between: Callable[[], None] | None = None) -> StepPlan | None:
        """One step; ``between`` runs after schedule and before update."""
        while len(self.in_flight) <= self.ahead and (made := self.scheduler.schedule()) is not None:
            self.plans.append(made)
            self.in_flight.append(made)
            self._check()
        assert self.in_flight or not self.scheduler.has_unfinished, "unfinished work must always have something to run"
        return self._finish_oldest(between) if self.in_flight else None

    def drain(self) -> None:
        """Run the plans in flight, and make no further one."""
        while self.in_flight:
            self._finish_oldest()

    def _finish_oldest(self, between: Callable[[], None] | None = None) -> StepPlan:
        plan = self.in_flight.popleft()
        result = self.worker.execute(plan)
        if between is not None:
            between()
        self._take(self.scheduler.update(plan, result))
        self._check()
        return plan

    def run(self, max_steps: int = 100_000) -> int:
        """Step until all requests have finished; returns the number of steps."""
        for number in range(max_steps):
            if self.step() is None:
                self.check_idle()
                return number
        raise AssertionError(f"not done after {max_steps} steps")

    def check_idle(self) -> None:
        """No request runs, no block is held, and every finished sequence is the fake model's."""
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_used_blocks == stats.num_running == stats.num_waiting == stats.num_live_tokens == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == self.limits.num_blocks
        for key in self.outputs:
            self.check_output(*key)

    def check_output(self, request_id: str, index: int) -> None:
        """Compare one sequence with the model applied to it alone."""
        request, output = self.requests[request_id], self.outputs[request_id, index]
        assert output.finish_reason is not None
        expected, reason = self.expected(request, index)
        if output.finish_reason is FinishReason.ABORT:
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert (output.token_ids, output.finish_reason) == (expected, reason)

    def expected(self, request: EngineRequest, index: int) -> tuple[list[int], FinishReason]:
        """Tokens and end of a sequence, computed from the request alone."""
        params, prompt = request.params, request.prompt_token_ids
        assert params.seed is not None
        longest = self.limits.max_sequence_tokens
        if params.max_tokens is not None:
            longest = min(longest, len(prompt) + params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
        tokens = expected_tokens(prompt, params.seed + index, longest, stop_ids, self.limits.windows)
        return tokens, FinishReason.STOP if tokens[-1] in stop_ids else FinishReason.LENGTH

    def _check(self) -> None:
        if self.checks and len(self.plans) % 80 < 20:
            self.scheduler.check_integrity()

    def _take(self, deltas: Iterable[SequenceDelta]) -> None:
        for delta in deltas:
            output = self.outputs[delta.request_id, delta.index]
            assert output.finish_reason is None, "a record after the last one"
            output.token_ids += delta.new_token_ids
            output.finish_reason = delta.finish_reason
            output.deltas.append(delta)


class RandomLoad:
    """A seeded stream of requests that share prefixes, fork, stop, differ in salt and priority, continue others and are
    aborted."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.simulation = simulation
        self.random = random.Random(seed)
        longest = min(simulation.limits.max_model_len - 1, simulation.limits.capacity_tokens)
        self.stems = [self._tokens(self.random.randint(1, longest)) for _ in range(4)]
        self.longest = longest

    def act(self) -> None:
        """One random act: mostly a step; requests arrive about as fast as they end."""
        choice = self.random.random()
        if choice < 0.25 and self.simulation.scheduler.num_unfinished < 12:
            self.add()
        elif choice < 0.29:
            self.abort()
        elif choice < 0.33:
            self.simulation.step(between=self.abort)
        elif choice < 0.335:
            self.simulation.scheduler.reset_prefix_cache()
        else:
            self.simulation.step()

    def add(self) -> None:
        """Add a prompt that begins with a piece of a stem, or with all of an earlier prompt and answer."""
        rng = self.random
        stem = rng.choice(self.stems)
        start = self._earlier() if rng.random() < 0.3 else stem[: rng.randint(0, len(stem))]
        prompt = (start + self._tokens(rng.randint(1, 6)))[: self.longest]
        number = len(self.simulation.requests)
        self.simulation.scheduler.prefetch_session(f"session {(number + 1) % 5}", "")
        self.simulation.add(
            prompt,
            prompt_cache_key=f"session {number % 5}",
            priority=rng.choice((0, 0, 0, 1, -1)),
            will_continue=rng.random() < 0.5,
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((1, 2, 5, 12, 40, None)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice(((), (3,), (3, 11))),
            cache_salt=rng.choice((None, None, None, "a", "b")),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )

    def abort(self) -> None:
        """Abort one unfinished request, and an unknown id."""
        open_ids = [key[0] for key, output in self.simulation.outputs.items() if output.finish_reason is None]
        if open_ids:
            self.simulation.abort(self.random.choice(open_ids), "unknown")

    def _earlier(self) -> list[int]:
        """Prompt and answer so far of one of the last requests."""
        chosen = self.random.choice(list(self.simulation.outputs)[-6:] or [None])
        if chosen is None:
            return []
        return self.simulation.requests[chosen[0]].prompt_token_ids + self.simulation.outputs[chosen].token_ids

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]


_OF_TIERS = {one.name for one in fields(TierLimits)}


def changed(given: SchedulerLimits, **changes: Any) -> SchedulerLimits:
    """``given`` with changes; those of features' sizes are entered there."""
    if max_loras := changes.pop("max_loras", 0):
        changes["extensions"] = {**given.extensions, "lora": AdapterSlots(max_loras=max_loras)}
        given = replace(given, extensions=changes["extensions"])
    if images := changes.pop("images", None):
        given = replace(given, extensions={**given.extensions, "images": images})
    tiers = {name: changes.pop(name) for name in _OF_TIERS & changes.keys()}
    if tiers:
        changes["extensions"] = {**given.extensions, LIMITS.name: replace(tiers_of(given), **tiers)}
    speculation: SpeculativeConfig | None = changes.pop("speculation", None)
    given = replace(given, **changes)
    if speculation is None:
        return given
    return replace(
        given,
        num_spare_rows=speculation.num_draft_rows(given.max_num_seqs, given.max_num_batched_tokens),
        extensions={**given.extensions, "speculation": SpeculationLimits(config=speculation)},
    )


def tiers_of(given: SchedulerLimits) -> TierLimits:
    """The sizes of the tiers."""
    return LIMITS.get(given) or TierLimits()


def limits(**changes: Any) -> SchedulerLimits:
    """Small limits, with changes."""
    small = SchedulerLimits(
        num_blocks=16, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, seed=0
    )
    return changed(small, **changes)
