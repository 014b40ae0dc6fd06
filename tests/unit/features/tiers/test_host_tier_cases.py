"""Chosen schedules of the host tier, among them those in which other engines hang or give garbled output.

Oracle: counts worked out by hand, and in every case the fake model and the content of blocks and slots.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.unit.features.tiers.host_tier_harness import Lag, TierSimulation
from tests.unit.sched.scheduler_harness import changed, limits
from tp_engine.features.tiers.feature import LOADS, STATS, WAIT_LOAD
from tp_engine.sched.scheduler import SchedulerLimits

ENDLESS: dict[str, Any] = {"ignore_eos": True}
POOL = limits(num_blocks=16, num_host_slots=64, max_num_batched_tokens=64, max_model_len=64)
SLOW = changed(POOL, max_num_batched_tokens=8, max_host_moves=2)  # a step needs no more blocks than it may store
LAGS = pytest.mark.parametrize("lag", list(Lag))
AHEAD = pytest.mark.parametrize("ahead", [0, 1])


def prompt(name: int, length: int) -> list[int]:
    return [name, *range(length - 1)]


def one_after_the_other(simulation: TierSimulation, names: list[int], length: int = 33) -> list[int]:
    """A request of two tokens for each name; how many prompt tokens each found cached."""
    found = []
    for name in names:
        request = simulation.add(prompt(name, length), max_tokens=2, seed=name, **ENDLESS)
        simulation.run()
        found.append(simulation.outputs[request.request_id, 0].deltas[0].num_cached_tokens)
    return found


def test_nothing_moves_while_everything_fits() -> None:
    """By hand: 15 of 16 blocks are ever used; the reserve is one block."""
    simulation = TierSimulation(POOL)
    assert one_after_the_other(simulation, [1] * 9, length=27) == [0] + [24] * 8
    assert one_after_the_other(simulation, [2] * 3, length=25) == [0] + [24] * 2
    worker = simulation.tier_worker
    assert worker.num_stores == worker.num_loads == worker.num_waits == 0


@LAGS
@AHEAD
def test_evicted_prefixes_come_back(lag: Lag, ahead: int) -> None:
    """By hand: six prompts of 8 full blocks each, a pool of 16; the second time each finds all its blocks."""
    simulation = TierSimulation(POOL, lag=lag, ahead=ahead)
    assert one_after_the_other(simulation, [1, 2, 3, 4, 5, 6]) == [0] * 6
    assert one_after_the_other(simulation, [1, 2, 3, 4, 5, 6]) == [32] * 6
    assert simulation.worker.num_computed_tokens == 6 * 34 + 6 * 2
    assert simulation.tier_worker.num_loads == 6 * 8


def test_pool_and_tier_are_one_queue() -> None:
    """Oracle: a pool of the summed size without a tier: the share of cached tokens, within two points."""
    rng = random.Random(5)
    names = [min(rng.randrange(80), rng.randrange(80)) for _ in range(300)]
    tiered = one_after_the_other(TierSimulation(changed(POOL, num_host_slots=336), checks=False), names)
    whole = one_after_the_other(TierSimulation(changed(POOL, num_blocks=352, num_host_slots=0), checks=False), names)
    most = len(names) * 32
    assert 0.3 < sum(whole) / most < 0.95
    assert sum(tiered) / most >= sum(whole) / most - 0.02


def test_one_load_for_all_that_share_a_prefix() -> None:
    """By hand: an evicted prefix of 8 blocks and 20 requests for it: 8 loads, and each computes its own 2 tokens."""
    given = limits(num_blocks=64, num_host_slots=128, max_num_seqs=32, max_num_batched_tokens=256)
    simulation = TierSimulation(given, ahead=1)
    one_after_the_other(simulation, list(range(1, 20)))
    before, loads = simulation.worker.num_computed_tokens, simulation.tier_worker.num_loads
    for number in range(20):
        simulation.add([*prompt(1, 32), 40, number], max_tokens=1, **ENDLESS)
    simulation.run()
    assert simulation.tier_worker.num_loads - loads == 8
    assert simulation.worker.num_computed_tokens - before == 20 * 2


def test_what_follows_an_evicted_prefix_is_computed_once() -> None:
    """By hand: 12 requests share 32 tokens on the host and 16 more that nothing has: these are computed once."""
    given = limits(num_blocks=64, num_host_slots=128, max_num_seqs=32, max_num_batched_tokens=256, max_host_moves=9)
    simulation = TierSimulation(given, ahead=1)
    one_after_the_other(simulation, list(range(1, 20)))
    before = simulation.worker.num_computed_tokens
    for number in range(12):
        simulation.add([*prompt(1, 32), *[41] * 16, number, 3], max_tokens=1, **ENDLESS)
    simulation.run()
    assert simulation.worker.num_computed_tokens - before == 16 + 12 * 2


def test_rows_decode_while_another_waits_for_its_loads() -> None:
    """By hand: 8 loads, 2 in a plan: the first plan that admits the row sends 2, and the row runs in the fifth."""
    simulation = TierSimulation(SLOW)
    one_after_the_other(simulation, [1, 2, 3, 4, 5, 6])
    simulation.add([9, 9, 9], max_tokens=20, **ENDLESS)
    simulation.step()
    simulation.add(prompt(1, 33), max_tokens=2, **ENDLESS)
    plans = [simulation.step() for _ in range(5)]
    assert [len(LOADS.of(plan)) for plan in plans if plan] == [2, 2, 2, 2, 0]
    assert [plan.prefill_tokens.tolist() for plan in plans if plan] == [[], [], [], [], [1]]
    assert [len(plan.decode_rows) for plan in plans if plan] == [1] * 5
    last = plans[-1]
    assert last is not None and WAIT_LOAD.of(last) > 0
    simulation.run()


def test_a_row_alone_waits_in_its_own_step() -> None:
    """By hand: nothing else can run, so all 8 loads go out at once, whatever their limit, and the step waits for
    them."""
    simulation = TierSimulation(SLOW)
    one_after_the_other(simulation, [1, 2, 3, 4, 5, 6])
    simulation.add(prompt(1, 33), max_tokens=2, **ENDLESS)
    plan = simulation.step()
    assert (
        plan is not None and len(LOADS.of(plan)) == 8 and plan.prefill_tokens.tolist() == [1] and WAIT_LOAD.of(plan) > 0
    )
    simulation.run()


@LAGS
@AHEAD
def test_preempted_rows_come_back_from_the_tier(lag: Lag, ahead: int) -> None:
    """Oracle: the same load without a tier computes tokens again; with it, at most those of unfilled blocks."""
    recomputed = []
    for num_slots in (0, 64):
        given = changed(POOL, num_blocks=18, num_host_slots=num_slots)
        simulation = TierSimulation(given, lag=lag, ahead=ahead)
        for number in range(6):
            simulation.add(prompt(number, 10), max_tokens=40, **ENDLESS)
        simulation.run()
        stats = simulation.scheduler.stats()
        assert stats.num_preemptions > 3
        recomputed.append(stats.num_recomputed_tokens / stats.num_preemptions)
    assert recomputed[0] > 4 >= recomputed[1]


@LAGS
@AHEAD
def test_loads_never_hold_what_the_first_request_needs(lag: Lag, ahead: int) -> None:
    """The hangs vllm#45388 and vllm#57841: loads hold blocks, and the head of the queue needs them, for ever.  Here
    rows that load are preempted like others.  Oracle: all requests end, in a pool that only one of them fits into."""
    given = changed(POOL, num_blocks=10, max_host_moves=1)
    simulation = TierSimulation(given, lag=lag, ahead=ahead)
    one_after_the_other(simulation, [1, 2, 3, 4])
    for name in (1, 2, 3, 4):
        simulation.add(prompt(name, 33), max_tokens=5, priority=1, **ENDLESS)
    for _ in range(3):
        simulation.step()
    simulation.add(prompt(9, 30), max_tokens=9, priority=-1, **ENDLESS)
    simulation.add(prompt(8, 36), max_tokens=4, priority=-1, **ENDLESS)
    assert simulation.run(max_steps=200) > 0


@LAGS
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_row_that_is_aborted_while_it_loads_leaves_nothing_wrong(lag: Lag, num_steps: int) -> None:
    """The garbled output of vllm#46278 and vllm#47282: blocks of a load or a store are given to others too early.
    Oracle: the content of blocks; the others take the blocks of the aborted row at once, and the prefix is whole."""
    given = changed(SLOW, num_blocks=12)
    simulation = TierSimulation(given, lag=lag, ahead=1)
    one_after_the_other(simulation, [1, 2, 3])
    simulation.add([7] * 3, max_tokens=30, **ENDLESS)
    simulation.step()
    simulation.add(prompt(1, 33), request_id="loads", max_tokens=2, **ENDLESS)
    for _ in range(num_steps):
        simulation.step()
    simulation.abort("loads")
    simulation.add(prompt(5, 30), max_tokens=2, **ENDLESS)
    simulation.run()
    assert one_after_the_other(simulation, [1]) == [32]


@LAGS
def test_a_row_shares_blocks_whose_loads_have_just_gone_out(lag: Lag) -> None:
    """The other half of vllm#47282: a row reads blocks before their load has ended.  The row that asked for the load is
    gone, so no other row of the plan waits for it.  Oracle: the content of blocks, and a plan that waits.  The pool
    keeps nine blocks free or clean, so that the first plan need not wait for a store."""
    given = changed(POOL, num_blocks=288, num_host_slots=512)
    simulation = TierSimulation(given, lag=lag, checks=False)
    one_after_the_other(simulation, list(range(1, 40)))
    simulation.add([9], max_tokens=30, **ENDLESS)
    simulation.step()
    simulation.add(prompt(1, 33), request_id="gone", max_tokens=2, **ENDLESS)
    plan = simulation.step()
    assert plan is not None and len(LOADS.of(plan)) == 8 and not len(plan.prefill_rows)
    simulation.abort("gone")
    simulation.add(prompt(1, 33), max_tokens=2, **ENDLESS)
    plan = simulation.step()
    assert plan is not None and plan.prefill_tokens.tolist() == [1] and WAIT_LOAD.of(plan) > 0
    simulation.run()


@LAGS
def test_a_store_reads_what_was_computed(lag: Lag) -> None:
    """The garbled output of vllm#45704: a store begins before the block is written.  A request that is aborted before
    its step has run leaves published blocks, which are stored with the next plan.  Oracle: the content of blocks."""
    simulation = TierSimulation(changed(POOL, num_blocks=9), lag=lag, ahead=1)
    simulation.add(prompt(1, 33), request_id="gone", max_tokens=2, **ENDLESS)
    simulation.step(between=lambda: simulation.abort("gone"))
    one_after_the_other(simulation, [2])
    assert one_after_the_other(simulation, [1]) == [32]


def test_what_no_slot_or_no_move_is_left_for_is_dropped_and_counted() -> None:
    """By hand: a plan may store 2 blocks; a prompt that needs the whole pool at once drops the others."""
    simulation = TierSimulation(changed(POOL, num_blocks=9, max_host_moves=2))
    one_after_the_other(simulation, [1, 2])
    stats = simulation.scheduler.stats()
    assert STATS.of(stats).num_dropped_blocks + STATS.of(stats).num_stored_blocks >= 8
    assert STATS.of(stats).num_dropped_blocks >= 4
    assert one_after_the_other(simulation, [1])[0] <= 16


def test_salts_hold_in_the_tier_too() -> None:
    """Oracle: a prompt of another salt finds nothing on the host."""
    simulation = TierSimulation(POOL)
    simulation.add(prompt(1, 33), max_tokens=2, cache_salt="a", **ENDLESS)
    simulation.run()
    one_after_the_other(simulation, [2, 3, 4, 5])
    for salt, found in (("b", 0), ("a", 32)):
        request = simulation.add(prompt(1, 33), max_tokens=2, cache_salt=salt, **ENDLESS)
        simulation.run()
        assert simulation.outputs[request.request_id, 0].deltas[0].num_cached_tokens == found


def test_a_cleared_cache_finds_nothing_on_the_host() -> None:
    """Oracle: no hits after ``reset_prefix_cache``, and all slots are free."""
    simulation = TierSimulation(POOL)
    one_after_the_other(simulation, [1, 2, 3, 4])
    assert STATS.of(simulation.scheduler.stats()).num_used_host_slots > 0
    assert simulation.scheduler.reset_prefix_cache()
    assert STATS.of(simulation.scheduler.stats()).num_used_host_slots == 0
    assert one_after_the_other(simulation, [1, 2]) == [0, 0]


@pytest.mark.parametrize("given", [POOL, changed(POOL, enable_prefix_caching=False)], ids=["cache", "no cache"])
def test_prompts_by_source(given: SchedulerLimits) -> None:
    """By hand: the second turn of six prompts has its 32 tokens from the host, the third at once from the device."""
    simulation = TierSimulation(given)
    one_after_the_other(simulation, [1, 2, 3, 4, 5, 6, 1, 1])
    stats = simulation.scheduler.stats()
    hits = (stats.num_prefix_hit_tokens, STATS.of(stats).num_host_hit_tokens)
    assert hits == ((64, 32) if given.enable_prefix_caching else (0, 0))


@LAGS
@AHEAD
def test_blocks_of_waiting_requests_come_in_while_others_run(lag: Lag, ahead: int) -> None:
    """By hand: the only row is taken for 30 steps; the 8 blocks of the next request are loaded meanwhile, so that it
    runs in the very plan that admits it, without a wait."""
    simulation = TierSimulation(changed(SLOW, num_blocks=40, max_num_seqs=1), lag=lag, ahead=ahead)
    one_after_the_other(simulation, [1, 2, 3, 4, 5, 6])
    simulation.add([9, 9, 9], max_tokens=30, **ENDLESS)
    simulation.step()
    simulation.add(prompt(1, 33), request_id="next", max_tokens=2, **ENDLESS)
    before = len(simulation.plans)
    simulation.run()
    plans = simulation.plans[before:]
    assert sum(len(LOADS.of(plan)) for plan in plans) == 8
    (entry,) = [plan for plan in plans if plan.admitted]
    assert entry.prefill_tokens.tolist() == [1] and not len(LOADS.of(entry))
    assert STATS.of(simulation.scheduler.stats()).num_host_hit_tokens == 32


def test_prefetching_takes_nothing_that_a_running_row_needs() -> None:
    """Oracle: a pool that the running row needs almost whole: it is not preempted, whatever waits behind it."""
    simulation = TierSimulation(changed(SLOW, num_blocks=10, max_num_seqs=1), ahead=1)
    one_after_the_other(simulation, [1, 2, 3, 4])
    simulation.add([9, 9, 9], max_tokens=36, **ENDLESS)
    for name in (1, 2, 3):
        simulation.add(prompt(name, 33), max_tokens=2, **ENDLESS)
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions == 0


def test_a_request_that_is_aborted_while_its_blocks_come_in() -> None:
    """Oracle: the blocks stay cached, and the next request finds them."""
    simulation = TierSimulation(changed(SLOW, num_blocks=40, max_num_seqs=1), ahead=1)
    one_after_the_other(simulation, [1, 2, 3, 4, 5, 6])
    simulation.add([9, 9, 9], max_tokens=30, **ENDLESS)
    simulation.step()
    simulation.add(prompt(1, 33), request_id="gone", max_tokens=2, **ENDLESS)
    simulation.step()
    simulation.step()
    simulation.abort("gone")
    simulation.run()
    assert one_after_the_other(simulation, [1]) == [32]
