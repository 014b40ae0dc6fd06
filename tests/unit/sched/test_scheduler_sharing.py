"""Shared prefixes and forks.  Oracle: counts of computed tokens and tables worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sched.scheduler_harness import RandomLoad, Simulation, limits
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.requests.sampling_params import SamplingParams

ROOMY = limits(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=512)
ENDLESS: dict[str, Any] = {"ignore_eos": True}


def test_shared_prefix_is_computed_once() -> None:
    """By hand: 32 prompts of 256 equal and 8 own tokens cost 256 + 32 * 8 tokens, in one step."""
    simulation = Simulation(ROOMY)
    stem = [number % 50 for number in range(256)]
    for number in range(32):
        simulation.add([*stem, number, *range(7)], max_tokens=1)
    simulation.run()
    assert simulation.worker.num_computed_tokens == 256 + 32 * 8
    assert len(simulation.plans) == 1
    assert simulation.scheduler.stats().num_prefix_hit_tokens == 31 * 256


def test_many_more_followers_than_are_passed_over_in_a_step() -> None:
    """By hand: 100 prompts of 64 equal and 4 own tokens through 32 rows; the prefix is computed once."""
    simulation = Simulation(ROOMY)
    for number in range(100):
        simulation.add([1] * 64 + [number // 50, number % 50, 2, 3], max_tokens=2, **ENDLESS)
    simulation.run()
    assert simulation.worker.num_computed_tokens == 64 + 100 * (4 + 1)


def test_prefix_in_chunks_is_computed_once() -> None:
    """By hand: the leader's chunks take four steps of 64 tokens; the followers begin behind the last chunk."""
    simulation = Simulation(limits(num_blocks=600, max_num_batched_tokens=64, max_model_len=512))
    stem = [number % 50 for number in range(252)]
    for number in range(4):
        simulation.add([*stem, number, 1, 2, 3], max_tokens=1)
    simulation.run()
    assert simulation.worker.num_computed_tokens == 252 + 4 * 4


def test_a_prefix_is_shared_in_the_step_that_computes_it() -> None:
    """By hand, blocks of 4: the second request uses two blocks that the first fills in the same step, the third
    none."""
    simulation = Simulation(ROOMY)
    for prompt in ([1] * 9, [1] * 10, [2] * 9):
        simulation.add(prompt, max_tokens=5, **ENDLESS)
    plan = simulation.step()
    assert plan is not None and [a.num_computed_tokens for a in plan.admitted] == [0, 8, 0]
    assert [a.block_ids.tolist() for a in plan.admitted] == [[0, 1, 2], [0, 1, 3], [4, 5, 6]]
    simulation.run()


def test_followers_outlive_a_leader_that_leaves() -> None:
    """By hand: the request that computes the prefix is aborted before its result; its blocks stay."""
    simulation = Simulation(ROOMY)
    simulation.add([1] * 9, max_tokens=2)
    simulation.add([1] * 10, max_tokens=2)
    plan = simulation.step(between=lambda: simulation.abort("r0"))
    assert plan is not None and [a.num_computed_tokens for a in plan.admitted] == [0, 8]
    simulation.add([1] * 11, max_tokens=2)
    plan = simulation.step()
    assert plan is not None and [a.num_computed_tokens for a in plan.admitted] == [8]
    simulation.run()


def test_a_tail_behind_blocks_that_are_still_computed_is_not_offered() -> None:
    """By hand: a request that others will continue is aborted before its result: 2 blocks may be used, its tail may
    not."""
    simulation = Simulation(ROOMY)
    simulation.add([1] * 10, max_tokens=2, will_continue=True)
    simulation.step(between=lambda: simulation.abort("r0"))
    simulation.add([1] * 12, max_tokens=2)
    plan = simulation.step()
    assert plan is not None and [a.num_computed_tokens for a in plan.admitted] == [8]
    assert len(plan.copies) == 0
    simulation.run()


def test_second_turn_hits_what_the_first_generated() -> None:
    """By hand: a prompt of 10 and 7 generated tokens have 16 computed tokens; the next turn finds 4 blocks."""
    simulation = Simulation(ROOMY)
    simulation.add(list(range(10)), max_tokens=7, **ENDLESS)
    simulation.run()
    answer = simulation.outputs["r0", 0].token_ids
    simulation.add([*range(10), *answer, 1, 2, 3], max_tokens=2)
    simulation.run()
    assert simulation.outputs["r1", 0].deltas[0].num_cached_tokens == 16


def test_golden_beams_copy_the_tail_of_the_one_that_they_continue() -> None:
    """By hand, blocks of 4: 6 tokens computed; two continuations share block 0, copy block 1 and compute one token."""
    simulation = Simulation(limits())
    simulation.add(list(range(6)), max_tokens=1, will_continue=True)
    simulation.run()
    assert simulation.scheduler.stats().num_cached_blocks == 2
    for token in (8, 9):
        simulation.add([*range(6), token], max_tokens=1, will_continue=True)
    plan = simulation.step()
    assert plan is not None and plan.prefill_tokens.tolist() == [1, 1]
    assert [a.num_computed_tokens for a in plan.admitted] == [6, 6]
    assert [a.block_ids.tolist() for a in plan.admitted] == [[0, 2], [0, 3]]
    assert plan.copies.tolist() == [[1, 2], [1, 3]]
    simulation.add([*range(6), 9, 1], max_tokens=1)
    last = simulation.step()
    assert last is not None and last.copies.tolist() == [[3, 4]]
    simulation.run()
    assert simulation.worker.num_computed_tokens == 6 + 2 + 1
    assert [output.deltas[0].num_cached_tokens for output in simulation.outputs.values()] == [0, 6, 6, 7]


def test_golden_a_tail_that_is_needed_at_once_is_not_copied() -> None:
    """By hand, a pool of two blocks: the continuation takes over the tail itself, with its content."""
    simulation = Simulation(limits(num_blocks=2))
    simulation.add(list(range(6)), max_tokens=1, will_continue=True)
    simulation.run()
    simulation.add([*range(6), 8], max_tokens=1)
    plan = simulation.step()
    assert plan is not None and len(plan.copies) == 0
    assert [a.block_ids.tolist() for a in plan.admitted] == [[0, 1]] and plan.prefill_tokens.tolist() == [1]
    simulation.run()


@pytest.mark.parametrize(
    ("options", "num_cached"), [({}, 6), ({"cache_salt": "a"}, 0), ({"prompt_logprobs": 0}, 0), ({"end": 6}, 4)]
)
def test_who_may_use_a_tail(options: dict[str, object], num_cached: int) -> None:
    """By definition: the same salt, no prompt positions to report, and a token left to compute."""
    simulation = Simulation(limits())
    simulation.add(list(range(6)), max_tokens=1, will_continue=True)
    simulation.run()
    options = dict(options)
    end = options.pop("end", 7)
    assert isinstance(end, int)
    simulation.add(list(range(7))[:end], max_tokens=1, **options)  # type: ignore[arg-type]
    simulation.run()
    assert simulation.outputs["r1", 0].deltas[0].num_cached_tokens == num_cached


@pytest.mark.parametrize(("salts", "hits"), [(("a", "b"), 0), ((None, "b"), 0), (("a", "a"), 8), ((None, None), 8)])
def test_salts_separate_tenants(salts: tuple[str | None, str | None], hits: int) -> None:
    """The promise: equal prompts share only under one salt."""
    simulation = Simulation(ROOMY)
    for salt in salts:
        simulation.add([1] * 10, max_tokens=1, cache_salt=salt)
    simulation.run()
    assert simulation.scheduler.stats().num_prefix_hit_tokens == hits


def test_reset_forgets_only_when_nothing_runs() -> None:
    """By definition: an error while a sequence holds blocks; afterwards no prompt hits."""
    simulation = Simulation(ROOMY)
    simulation.add([1] * 10, max_tokens=3, **ENDLESS)
    simulation.step()
    assert not simulation.scheduler.reset_prefix_cache()
    simulation.run()
    assert simulation.scheduler.stats().num_cached_blocks == 3
    assert simulation.scheduler.reset_prefix_cache()
    assert simulation.scheduler.stats().num_cached_blocks == 0
    simulation.add([1] * 10, max_tokens=3, **ENDLESS)
    simulation.run()
    assert simulation.scheduler.stats().num_prefix_hit_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
def test_golden_fork_copies_the_last_partial_block(caching: bool) -> None:
    """By hand, prompt of 7, blocks of 4: siblings share block 0, copy block 1, and compute position 6 only."""
    simulation = Simulation(limits(enable_prefix_caching=caching))
    simulation.add(list(range(7)), n=3, max_tokens=4, seed=5, **ENDLESS)
    first, second = simulation.step(), simulation.step()
    assert first is not None and len(first.admitted) == 1
    assert second is not None and [a.sampling.seed for a in second.admitted] == [6, 7]
    assert [a.block_ids.tolist() for a in second.admitted] == [[0, 2], [0, 3]]
    assert [a.num_computed_tokens for a in second.admitted] == [6, 6]
    assert second.copies.tolist() == [[1, 2], [1, 3]]
    assert second.prefill_tokens.tolist() == [1, 1] and second.decode_rows.tolist() == [0]
    simulation.run()
    assert simulation.worker.num_computed_tokens == 7 + 2 + 3 * 3


def test_golden_fork_at_a_block_end_copies_nothing() -> None:
    """By hand, prompt of 9: position 8 opens a block, so siblings share two blocks and take a new one."""
    simulation = Simulation(limits())
    simulation.add(list(range(9)), n=2, max_tokens=4, **ENDLESS)
    simulation.step()
    plan = simulation.step()
    assert plan is not None and plan.admitted[0].block_ids.tolist() == [0, 1, 3]
    assert len(plan.copies) == 0
    simulation.run()


def test_siblings_without_a_donor_enter_like_others() -> None:
    """By hand, one row: each sibling enters when the one before has left, and hits the prompt's full block."""
    simulation = Simulation(limits(max_num_seqs=1))
    simulation.add(list(range(7)), n=3, max_tokens=2, **ENDLESS)
    simulation.run()
    assert simulation.worker.num_computed_tokens == (7 + 1) + 2 * (3 + 1)
    assert sum(len(plan.copies) for plan in simulation.plans) == 0


def test_many_siblings_over_a_chunked_prompt() -> None:
    """By hand: the prompt of 40 is computed once in chunks of 8, then 15 siblings compute one token; all decode 2."""
    simulation = Simulation(limits(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=8, max_model_len=64))
    simulation.add(list(range(40)), n=16, max_tokens=3, **ENDLESS)
    simulation.run()
    assert simulation.worker.num_computed_tokens == 40 + 15 + 16 * 2


def test_seeds_of_requests_without_one_are_reproducible() -> None:
    """By definition: equal in two runs, different between requests and engine seeds, siblings one apart."""

    def seeds(engine_seed: int) -> list[int]:
        simulation = Simulation(limits(seed=engine_seed))
        params = SamplingParams(n=2, max_tokens=1)
        for name in ("a", "b"):
            simulation.scheduler.add(EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=params))
        found = []
        while (plan := simulation.scheduler.schedule()) is not None:
            found += [admission.sampling.seed for admission in plan.admitted]
            simulation.scheduler.update(plan, simulation.worker.execute(plan))
        return found

    first = seeds(0)
    assert first == seeds(0) != seeds(1)
    assert len(set(first)) == 4
    assert sorted(first)[1] - sorted(first)[0] == 1


def test_no_request_starves_behind_a_stream_that_shares() -> None:
    """The promise: a request with the same stem as an endless stream of later requests is served in bounded time."""
    simulation = Simulation(limits(num_blocks=10, max_num_seqs=3, max_num_batched_tokens=8))
    load = RandomLoad(simulation, seed=4)
    for _ in range(40):
        load.act()
    watched = simulation.add([*load.stems[0], 1][:30], max_tokens=4).request_id
    for _ in range(400):
        if simulation.outputs[watched, 0].finish_reason is not None:
            break
        simulation.add([*load.stems[0], 2][:30], max_tokens=4)
        simulation.step()
    assert simulation.outputs[watched, 0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    simulation.run()


def test_a_fork_waits_for_what_its_donor_begins_with_as_a_copy() -> None:
    """By hand, blocks of 4: the first output begins with a tail, copied from 1 to 2.  A step makes all copies at once,
    so the second output copies 2 in the next step."""
    simulation = Simulation(limits())
    simulation.add([1] * 6, max_tokens=1, will_continue=True)
    simulation.run()
    simulation.add([*[1] * 6, 8], n=2, max_tokens=3, **ENDLESS)
    plans = [simulation.step(), simulation.step()]
    assert [plan.copies.tolist() for plan in plans if plan is not None] == [[[1, 2]], [[2, 3]]]
    simulation.run()


def test_a_fork_waits_for_what_its_donor_shares_in_the_step_that_computes_it() -> None:
    """By hand, blocks of 4: after a preemption the first output has nine tokens and shares eight of them with a prompt
    of the same step.  The second output needs the first of the last four, which can be copied one step later."""
    simulation = Simulation(limits(max_num_seqs=3, num_blocks=40))
    for token in (8, 9):
        simulation.add([token], request_id=f"filler {token}", max_tokens=50, **ENDLESS)
    simulation.add([1] * 6, n=2, request_id="forks", max_tokens=20, **ENDLESS)
    for _ in range(3):
        simulation.step()
    batch = simulation.scheduler.state
    (first,) = (sequence for sequence in batch.rows.running() if sequence.request_id == "forks")
    batch.preempt(first)
    simulation.abort("filler 8", "filler 9")
    assert simulation.scheduler.reset_prefix_cache() and len(first.token_ids) == 9
    simulation.add([*first.token_ids.tolist(), 5, 5, 5], priority=-1, max_tokens=1)
    plans = [simulation.step(), simulation.step()]
    admitted = [[one.num_computed_tokens for one in plan.admitted] for plan in plans if plan is not None]
    assert admitted == [[0, 8], [5]]
    simulation.run()
