"""Sequences with grammars in the scheduler.

The grammar is this file's own: the allowed next tokens are a function of all tokens generated so far, so a mask that is
late, early, another row's or missing gives a wrong token.  The worker checks every mask against the tokens that *it*
knows of the row; the tokens of every sequence are those of the grammar and the fake model applied to it alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.masks import FoundMasks
from tests.tiers import slow_but
from tests.unit.features.speculation.test_speculation import PROPOSERS, ScriptedSource
from tests.unit.sched.scheduler_harness import (
    EOS,
    VOCABULARY,
    FakeRow,
    FakeWorker,
    RandomLoad,
    Simulation,
    chain_hashes,
    limits,
    next_token,
    visible,
)
from tp_engine.errors import INVALID_GRAMMAR
from tp_engine.features.speculation.feature import BASE_ROWS, COUNTERS, draft_rows
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.speculation.proposer import Proposer
from tp_engine.features.structured_output.constraint import Grammar
from tp_engine.features.structured_output.feature import MASK_ROWS, MASKS
from tp_engine.features.structured_output.scheduling import ConstrainedRows
from tp_engine.plan import IntArray, StepPlan
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.requests.structured_outputs import StructuredOutputsParams
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits

NUM_WORDS = 2
CONSTRAINED_SEEDS = 10_000  # seeds from here on belong to sequences with a grammar
GRAMMAR = StructuredOutputsParams(regex="any: the grammar is this file's own")


def allowed_after(generated: Sequence[int]) -> list[int]:
    """About a third of the tokens, or a single one; EOS only after an even number of them."""
    state = zlib.crc32(bytes(generated))
    if state % 4 == 0:
        return [state % EOS]
    chosen = {t for t in range(VOCABULARY) if zlib.crc32(bytes((t,)), state) % 3 == 0} - {EOS}
    return sorted(chosen | ({EOS} if len(generated) % 2 == 0 else {(EOS + 1) % VOCABULARY}))


def is_over_after(generated: Sequence[int]) -> bool:
    return len(generated) > 2 and (sum(generated) + len(generated)) % 11 == 0


def choose(wanted: int, allowed: Sequence[int]) -> int:
    """The fake model's choice among the allowed tokens: the first one from the wanted token upwards."""
    return min(allowed, key=lambda token_id: (token_id - wanted) % VOCABULARY)


class FakeConstraint:
    def __init__(self) -> None:
        self.generated: list[int] = []
        self.is_over = False
        self.error: str | None = None
        self.error_code = INVALID_GRAMMAR
        self.is_quick, self.may_be_over = True, False

    def accept(self, token_id: int) -> bool:
        if token_id not in allowed_after(self.generated):
            self.is_over = True
            return False
        self.generated.append(token_id)
        self.is_over = token_id == EOS or is_over_after(self.generated)
        return True

    def forced(self) -> list[int]:
        found: list[int] = []
        while len(allowed := allowed_after(self.generated + found)) == 1 and len(found) < 9:
            found += allowed
        return found

    def decide(self) -> None:
        raise AssertionError("it knows itself")

    def may_end(self, mask: IntArray) -> bool:
        return len(self.generated) % 2 == 0

    def copy(self) -> FakeConstraint:
        other = FakeConstraint()
        other.generated, other.is_over = self.generated.copy(), self.is_over
        return other


class FakeGrammar:
    """``started``: the ``ignore_eos`` of every started sequence."""

    def __init__(self) -> None:
        self.started: list[bool] = []

    def start(self, *, ignore_eos: bool) -> FakeConstraint:
        self.started.append(ignore_eos)
        return FakeConstraint()


def fill_masks(constraints: Sequence[Any]) -> IntArray:
    flags = np.zeros((len(constraints), NUM_WORDS * 32), dtype=np.uint8)
    for row, constraint in zip(flags, constraints, strict=True):
        row[allowed_after(constraint.generated)] = 1
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def constrain(scheduler: Scheduler, request_id: str, grammar: Grammar) -> None:
    """The request's grammar is compiled."""
    rows = scheduler.feature(ConstrainedRows)
    assert rows is not None
    rows.constrain(request_id, grammar)


class MaskedWorker(FakeWorker):
    """Samples under the plan's masks, and checks the masks."""

    def _sample(self, plan: StepPlan) -> np.ndarray[Any, np.dtype[np.int32]]:
        masks = dict(zip(MASK_ROWS.of(plan).tolist(), MASKS.of(plan), strict=True))
        sampled = [row for row in plan.sampled_rows.tolist() if row < self.limits.max_num_seqs]
        drafting = dict(zip(draft_rows(plan).tolist(), BASE_ROWS.of(plan).tolist(), strict=True))
        owners = {row: row for row in sampled} | drafting
        is_constrained = {row: self.rows[owner].seed >= CONSTRAINED_SEEDS for row, owner in owners.items()}
        assert sorted(masks) == sorted(row for row in owners if is_constrained[row])
        super()._sample(plan)
        for number in masks.keys() - drafting.keys():
            row = self.rows[number]
            row.token_ids.pop()
            row.chain.pop()
            row.token_ids.append(self._choose_masked(row, masks[number]))
            row.chain += chain_hashes(row.token_ids, row.chain)
        return np.array([self.rows[row].token_ids[-1] for row in sampled], dtype=np.int32)

    def _sample_lane(self, plan: StepPlan, place: int, draft_row: FakeRow) -> int:
        masks = dict(zip(MASK_ROWS.of(plan).tolist(), MASKS.of(plan), strict=True))
        if place not in masks:
            return super()._sample_lane(plan, place, draft_row)
        return self._choose_masked(draft_row, masks[place])

    def _choose_masked(self, row: FakeRow, mask: IntArray) -> int:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed == allowed_after(row.token_ids[self.num_prompt[row.seed] :]), "another mask than the row's own"
        return choose(next_token(self._seen(row), row.computed, row.seed), allowed)

    def _apply_rows(self, plan: StepPlan) -> None:
        super()._apply_rows(plan)
        for admission in plan.admitted:
            self.num_prompt[admission.sampling.seed] = admission.num_prompt_tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_prompt: dict[int, int] = {}


class GrammarSimulation(Simulation):
    """Requests with a large seed have a grammar, which is ready at once, or when ``compiled`` says so."""

    def __init__(
        self,
        given: SchedulerLimits,
        *,
        ahead: int = 0,
        at_once: bool = True,
        proposer: Proposer | None = None,
        masks: FoundMasks | None = None,
    ) -> None:
        super().__init__(given, ahead=ahead)
        sources = None if proposer is None else [proposer]
        self.masks = FoundMasks(fill_masks) if masks is None else masks
        self.scheduler = Scheduler(given, given={"speculation": sources, "structured_output": self.masks})
        self.worker = MaskedWorker(given)
        self.at_once = at_once
        self.grammar = FakeGrammar()

    def add(self, prompt: list[int], **options: Any) -> EngineRequest:
        options.setdefault("seed", len(self.requests) * 16)
        if options["seed"] >= CONSTRAINED_SEEDS:
            options["structured_outputs"] = GRAMMAR
        request = super().add(prompt, **options)
        if self.at_once:
            self.compiled(request.request_id)
        return request

    def compiled(self, request_id: str) -> None:
        constrain(self.scheduler, request_id, self.grammar)
        self.scheduler.check_integrity()

    def expected(self, request: EngineRequest, index: int) -> tuple[list[int], FinishReason]:
        params = request.params
        if params.structured_outputs is None:
            return super().expected(request, index)
        assert params.seed is not None and params.max_tokens is not None
        length = min(self.limits.max_sequence_tokens - len(request.prompt_token_ids), params.max_tokens)
        generated: list[int] = []
        while len(generated) < length:
            known = [*request.prompt_token_ids, *generated]
            drawn = next_token(visible(known, self.limits.windows), len(known), params.seed + index)
            generated.append(choose(drawn, allowed_after(generated)))
            ends = generated[-1] == EOS or generated[-1] in params.stop_token_ids or is_over_after(generated)
            if ends:
                return generated, FinishReason.STOP
        return generated, FinishReason.LENGTH


class MixedLoad(RandomLoad):
    """A random half of all requests has a grammar."""

    def add(self) -> None:
        simulation, rng = self.simulation, self.random
        seed = len(simulation.requests) * 16 + (CONSTRAINED_SEEDS if rng.random() < 0.5 else 0)
        stem = rng.choice(self.stems)
        start = self._earlier() if rng.random() < 0.3 else stem[: rng.randint(0, len(stem))]
        simulation.scheduler.prefetch_session(f"session {(len(simulation.requests) + 1) % 5}", "")
        simulation.add(
            (start + self._tokens(rng.randint(1, 6)))[: self.longest],
            prompt_cache_key=f"session {len(simulation.requests) % 5}",
            seed=seed,
            priority=rng.choice((0, 0, 1)),
            n=rng.choice((1, 1, 2, 3)),
            max_tokens=rng.choice((1, 2, 5, 12, 40)),
            stop_token_ids=rng.choice(((), (3,))),
        )


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_blocks": 8, "max_num_batched_tokens": 5, "max_model_len": 30}, {"max_num_batched_tokens": 7}],
    ids=["room", "preemption", "chunks"],
)
def test_random_mixtures(changes: dict[str, int], ahead: int) -> None:
    """Oracle: the grammar and the fake model, over chunks, forks, preemption, the prefix cache, stops, aborts, plans
    ahead."""
    num_preemptions = 0
    for seed in range(2):
        simulation = GrammarSimulation(limits(**changes), ahead=ahead)
        load = MixedLoad(simulation, seed)
        for _ in range(150):
            load.act()
        simulation.run()
        num_preemptions += simulation.scheduler.stats().num_preemptions
        assert any(len(MASK_ROWS.of(plan)) for plan in simulation.plans)
    assert num_preemptions > 0 or "num_blocks" not in changes


@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("ahead", slow_but([1], [0, 1]))
def test_draft_tokens_change_no_token_of_a_grammar(kind: str, ahead: int) -> None:
    """Oracle: the grammar and the fake model; every draft row's mask is the grammar's behind the draft row's draft
    tokens."""
    num_masked, num_accepted = 0, dict[str, int]()
    for seed, changes in enumerate(({}, {"num_blocks": 8, "max_num_batched_tokens": 9, "max_model_len": 30})):
        source = ScriptedSource(PROPOSERS[kind])
        config = SpeculativeConfig(num_speculative_tokens=5, max_step_rows=16)
        given = limits(speculation=config, **changes)
        source.simulation = simulation = GrammarSimulation(given, ahead=ahead, proposer=source)
        load = MixedLoad(simulation, seed)
        for _ in range(200):
            load.act()
        simulation.run()
        for plan in simulation.plans:
            num_masked += int(np.isin(draft_rows(plan), MASK_ROWS.of(plan)).sum())
        stats = COUNTERS.get(simulation.scheduler.stats())
        assert stats is not None
        assert stats.by_source["grammar"][0] == stats.by_source["grammar"][1], "forced tokens are right"
        for name, (_, right) in stats.by_source.items():
            num_accepted[name] = num_accepted.get(name, 0) + right
    assert num_masked > 10 and num_accepted["grammar"] > 10
    assert num_accepted["scripted"] > 0 or kind in ("wrong", "random")


def test_plain_rows_go_on_while_a_few_others_wait_for_their_tokens() -> None:
    """Oracle: with one grammar among five rows, every plan has all plain rows; every second plan has the grammar's
    row."""
    simulation = GrammarSimulation(limits(num_blocks=64), ahead=1)
    for number in range(4):
        simulation.add([number + 1] * 3, ignore_eos=True, max_tokens=20)
    constrained = simulation.add([9, 9, 9], seed=CONSTRAINED_SEEDS, max_tokens=10)
    simulation.run()
    steady = simulation.plans[2:12]
    assert all(len(set(plan.decode_rows.tolist()) - set(MASK_ROWS.of(plan).tolist())) == 4 for plan in steady)
    assert [len(MASK_ROWS.of(plan)) for plan in steady[:4]] in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert simulation.outputs[constrained.request_id, 0].token_ids


def test_no_plan_is_sent_ahead_where_half_of_the_rows_wait() -> None:
    """Oracle: two of three rows have a grammar, so every step has all three."""
    simulation = GrammarSimulation(limits(num_blocks=64), ahead=1)
    simulation.add([1, 2, 3], ignore_eos=True, max_tokens=8)
    for number in range(2):
        simulation.add([4, 5, 6 + number], seed=CONSTRAINED_SEEDS + 16 * number, max_tokens=3)
    simulation.run()
    assert [len(plan.decode_rows) for plan in simulation.plans[1:3]] == [3, 3]


def test_a_request_waits_for_its_grammar_and_holds_up_nobody() -> None:
    simulation = GrammarSimulation(limits(), at_once=False)
    waiting = simulation.add([1, 2, 3], seed=CONSTRAINED_SEEDS, n=2, max_tokens=4, ignore_eos=True)
    simulation.add([1, 2, 3], max_tokens=4)
    for _ in range(4):
        assert simulation.step() is not None
    assert simulation.scheduler.schedule() is None and simulation.scheduler.has_unfinished
    assert simulation.scheduler.stats().num_waiting == 2
    simulation.compiled(waiting.request_id)
    simulation.compiled(waiting.request_id)  # a second time changes nothing
    assert simulation.grammar.started == [True]  # the second sequence is made behind the first
    simulation.run()
    assert simulation.grammar.started == [True, True]


def test_a_request_that_waits_for_its_grammar_can_end() -> None:
    """Oracle: an abort or an error ends a request that waits for its grammar; a grammar that comes later is ignored."""
    simulation = GrammarSimulation(limits(), at_once=False)
    for request_id, error in (("aborted", None), ("failed", "no such rule")):
        simulation.add([1, 2, 3], request_id=request_id, seed=CONSTRAINED_SEEDS, n=2)
        deltas = simulation.scheduler.abort([request_id], error)
        assert [(delta.index, delta.error) for delta in deltas] == [(0, error), (1, error)]
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        assert all(delta.finish_reason is reason for delta in deltas)
        assert not simulation.scheduler.has_unfinished and simulation.scheduler.stats().num_waiting == 0
        simulation.compiled(request_id)
    assert not simulation.grammar.started


class StubbornConstraint(FakeConstraint):
    """Refuses the second token, or cannot continue."""

    def __init__(self, error: str | None) -> None:
        super().__init__()
        self._error = error

    def accept(self, token_id: int) -> bool:
        if self.generated:
            self.is_over, self.error = True, self._error
            return False
        return super().accept(token_id)

    def copy(self) -> StubbornConstraint:
        other = StubbornConstraint(self._error)
        other.generated = self.generated.copy()
        return other


@pytest.mark.parametrize("error", [None, "the grammar has become too large"])
def test_a_refused_token_ends_the_sequence_without_it(error: str | None) -> None:
    """Oracle: the one token before; ``stop``, or the grammar's error."""

    class StubbornGrammar:
        def start(self, *, ignore_eos: bool) -> FakeConstraint:
            return StubbornConstraint(error)

    simulation = GrammarSimulation(limits(), at_once=False)
    request = simulation.add([1, 2, 3], seed=CONSTRAINED_SEEDS, max_tokens=9, logprobs=None)
    constrain(simulation.scheduler, request.request_id, StubbornGrammar())
    simulation.step()
    simulation.step()
    output = simulation.outputs[request.request_id, 0]
    assert len(output.token_ids) == 1 and output.deltas[-1].new_token_ids == []
    assert output.finish_reason is (FinishReason.STOP if error is None else FinishReason.ERROR)
    assert output.deltas[-1].error == error and output.deltas[-1].ends_with_text
    assert not simulation.scheduler.has_unfinished
    assert simulation.scheduler.stats().num_used_blocks == 0
