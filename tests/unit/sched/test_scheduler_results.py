"""Stops, limits and log-probabilities.  Oracle: tokens chosen by the test, and rules written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.sched.scheduler_harness import EOS, limits
from tp_engine.plan import NO_IDS, StepPlan, StepResult, TokenLogprobs
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def add(scheduler: Scheduler, prompt: list[int], name: str = "r", priority: int = 0, **params: object) -> None:
    """Queue one request."""
    scheduler.add(
        EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),  # type: ignore[arg-type]
            eos_token_ids=(EOS, EOS + 1),
            priority=priority,
        )
    )


def feed(scheduler: Scheduler, *token_ids: int) -> list[SequenceDelta]:
    """One step whose sampled rows get these tokens; returns the record of each."""
    plan = scheduler.schedule()
    assert plan is not None
    output = scheduler.update(plan, StepResult(step_id=plan.step_id, token_ids=np.array(token_ids, dtype=np.int32)))
    scheduler.check_integrity()
    return sorted(output, key=lambda delta: (delta.request_id, delta.index))


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({}, [1, EOS], STOP, None),
        ({}, [1, EOS + 1], STOP, None),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, EOS, EOS], LENGTH, None),
        ({"stop_token_ids": [40]}, [1, 40], STOP, 40),
        ({"stop_token_ids": [EOS]}, [EOS], STOP, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], STOP, EOS),
        ({"max_tokens": 2}, [1, EOS], STOP, None),
        ({"max_tokens": 2}, [1, 2], LENGTH, None),
        ({"max_tokens": 1}, [1], LENGTH, None),
        ({"min_tokens": 2, "max_tokens": 5}, [EOS, EOS, EOS], STOP, None),
        ({"min_tokens": 2, "max_tokens": 2}, [EOS, EOS], LENGTH, None),
        ({"max_tokens": None}, [1] * 14, LENGTH, None),
        ({"max_tokens": 100}, [1] * 14, LENGTH, None),
    ],
)
def test_how_a_sequence_ends(
    params: dict[str, Any], tokens: list[int], reason: FinishReason, stop_reason: int | None
) -> None:
    """By the rules, with 2 prompt tokens and max_model_len 16: it ends with exactly the last of these tokens."""
    scheduler = Scheduler(limits(max_model_len=16))
    add(scheduler, [1, 2], **params)
    for number, token_id in enumerate(tokens, start=1):
        (delta,) = feed(scheduler, token_id)
        assert delta.new_token_ids == [token_id]
        assert (delta.finish_reason is not None) == (number == len(tokens))
    assert (delta.finish_reason, delta.stop_reason) == (reason, stop_reason)
    assert not scheduler.has_unfinished and scheduler.schedule() is None


def test_stop_ids_of_one_request_do_not_end_another() -> None:
    """By the rules: only a row's own ids count, and ids beyond all stop ids are harmless."""
    scheduler = Scheduler(limits())
    add(scheduler, [1], "a", stop_token_ids=[30])
    add(scheduler, [2], "b", stop_token_ids=[31])
    assert [delta.finish_reason for delta in feed(scheduler, 31, 1_000_000)] == [None, None]
    assert [delta.finish_reason for delta in feed(scheduler, 30, 30)] == [STOP, None]
    assert [delta.finish_reason for delta in feed(scheduler, 31)] == [STOP]


def test_stop_ids_travel_only_with_min_tokens() -> None:
    """By the plan's contract: EOS and stop ids, sorted, for rows whose sampler must suppress them; bias and allowed
    ids."""
    scheduler = Scheduler(limits())
    add(scheduler, [1], "a", stop_token_ids=[3])
    add(scheduler, [2], "b", stop_token_ids=[3], min_tokens=1, logit_bias={5: 1.5, 2: -1.0}, allowed_token_ids=[9, 4])
    add(scheduler, [3], "c", stop_token_ids=[3], min_tokens=1, ignore_eos=True, top_k=-1)
    plan = scheduler.schedule()
    assert plan is not None
    first, second, third = (admission.sampling for admission in plan.admitted)
    assert first.stop_token_ids is NO_IDS and third.stop_token_ids.tolist() == [3] and third.top_k == 0
    assert second.stop_token_ids.tolist() == [3, EOS, EOS + 1]
    assert dict(zip(second.bias_token_ids.tolist(), second.bias_values.tolist(), strict=True)) == {5: 1.5, 2: -1.0}
    assert second.allowed_token_ids.tolist() == [9, 4]


@pytest.mark.parametrize(("seed", "index", "row_seed"), [(2**63 - 1, 1, -(2**63)), (-5, 0, -5), (7, 1, 8)])
def test_seeds_stay_in_64_bits(seed: int, index: int, row_seed: int) -> None:
    """By definition: seed + index, wrapped to a signed 64-bit number."""
    scheduler = Scheduler(limits())
    add(scheduler, [1], n=2, seed=seed)
    seeds = []
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        seeds += [admission.sampling.seed for admission in plan.admitted]
        tokens = np.ones(len(plan.sampled_rows), dtype=np.int32)
        scheduler.update(plan, StepResult(step_id=plan.step_id, token_ids=tokens))
    assert seeds[index] == row_seed


def table(values: list[list[int]]) -> TokenLogprobs:
    """Log-probabilities whose values show their place."""
    ids = np.array(values, dtype=np.int32)
    return TokenLogprobs(token_ids=ids, logprobs=-ids.astype(np.float32), ranks=ids[:, 0])


def test_logprobs_reach_their_rows_past_an_aborted_one() -> None:
    """By hand: three rows ask for 2, 0 and none; the first is aborted before its result."""
    scheduler = Scheduler(limits())
    for name, num_logprobs in (("a", 2), ("b", 0), ("c", None), ("d", 1)):
        add(scheduler, [1, 2], name, logprobs=num_logprobs, max_tokens=5)
    plan = scheduler.schedule()
    assert plan is not None
    rows = len(plan.sampled_rows)
    logprobs = table([[10 * row, 10 * row + 1, 10 * row + 2] for row in range(rows)])
    scheduler.abort(["a"])
    result = StepResult(step_id=plan.step_id, token_ids=np.arange(rows, dtype=np.int32), logprobs=logprobs)
    deltas = scheduler.update(plan, result)
    found = {delta.request_id: delta for delta in deltas}
    assert sorted(found) == ["b", "c", "d"]
    assert found["b"].new_token_ids == [1] and found["b"].logprobs is not None
    assert found["b"].logprobs.token_ids.tolist() == [[10]] and found["b"].logprobs.ranks.tolist() == [10]
    assert found["c"].logprobs is None
    assert found["d"].logprobs is not None and found["d"].logprobs.logprobs.tolist() == [[-30.0, -31.0]]


def prompt_result(plan: StepPlan, asked: list[int]) -> StepResult:
    """A result whose prompt log-probabilities count the chunk's positions."""
    chunks = dict(zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), strict=True))
    return StepResult(
        step_id=plan.step_id,
        token_ids=np.ones(len(plan.sampled_rows), dtype=np.int32),
        prompt_logprobs={row: table([[i, i + 1] for i in range(chunks[row])]) for row in asked if row in chunks},
    )


def test_prompt_logprobs_come_with_the_first_token_and_use_no_cache() -> None:
    """By hand, chunks of 4, half a step: three of one prompt arrive in order with the first record, though it is
    cached."""
    scheduler = Scheduler(limits(max_num_batched_tokens=8))
    for name, wanted in (("warm", None), ("asks", 1)):
        add(scheduler, list(range(10)), name, prompt_logprobs=wanted, max_tokens=2)
        deltas: list[SequenceDelta] = []
        while (plan := scheduler.schedule()) is not None:
            deltas += scheduler.update(plan, prompt_result(plan, [0]))
        assert len(deltas) == 2 and deltas[1].prompt_logprobs == []
        chunks = [len(part.ranks) for part in deltas[0].prompt_logprobs]
        assert chunks == ([4, 4, 2] if wanted is not None else [])
        assert deltas[0].num_cached_tokens == 0
    assert deltas[0].prompt_logprobs[0].token_ids.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_step_scores_at_most_half_of_its_tokens() -> None:
    """What waits beside scored prompts does not wait longer than beside others, though these take more time.  By hand,
    8 tokens in a step: a scored prompt of 6, one of 5, and a prompt of 7 that nobody scores, which fills what is left;
    alone a scored prompt goes on by 4."""
    scheduler = Scheduler(limits(max_num_batched_tokens=8))
    for name, length, wanted in (("a", 6, 0), ("b", 5, 0), ("plain", 7, None)):
        add(scheduler, [len(name)] * length, name, prompt_logprobs=wanted, max_tokens=1)
    steps = []
    while (plan := scheduler.schedule()) is not None:
        steps.append(dict(zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), strict=True)))
        scheduler.update(plan, prompt_result(plan, list(steps[-1])))
        scheduler.check_integrity()
    assert [sorted(step.values()) for step in steps] == [[4, 4], [2, 2, 3], [3]]


def test_only_the_first_sibling_reports_the_prompt() -> None:
    """By definition: one report per request; siblings fork."""
    scheduler = Scheduler(limits())
    add(scheduler, [1, 2, 3], n=2, prompt_logprobs=0, max_tokens=3, ignore_eos=True)
    plan = scheduler.schedule()
    assert plan is not None and plan.admitted[0].sampling.prompt_logprobs == 0
    scheduler.update(plan, prompt_result(plan, [0]))
    plan = scheduler.schedule()
    assert plan is not None and plan.admitted[0].sampling.prompt_logprobs == -1
    assert plan.admitted[0].num_computed_tokens == 2


def test_preemption_before_the_first_token_starts_the_report_again() -> None:
    """By hand, 4 blocks of 4: the long prompt loses its first chunk to a request of higher priority."""
    scheduler = Scheduler(limits(num_blocks=4, max_num_batched_tokens=16))
    add(scheduler, [1] * 12, "late", priority=1, prompt_logprobs=0, max_tokens=1)
    plan = scheduler.schedule()
    assert plan is not None and plan.prefill_tokens.tolist() == [8]
    scheduler.update(plan, prompt_result(plan, [0]))
    add(scheduler, [2] * 15, "first", max_tokens=1)
    deltas: list[SequenceDelta] = []
    while (plan := scheduler.schedule()) is not None:
        rows = {a.row for a in plan.admitted} | set(plan.prefill_rows.tolist())
        deltas += scheduler.update(plan, prompt_result(plan, sorted(rows)))
        scheduler.check_integrity()
    late = next(delta for delta in deltas if delta.request_id == "late")
    assert sum(len(part.ranks) for part in late.prompt_logprobs) == 12
