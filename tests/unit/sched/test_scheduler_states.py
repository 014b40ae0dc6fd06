"""The scheduler of models with recurrent states: a state exists only as it is behind a row's last computed token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiers import slow_but
from tests.unit.sched.scheduler_harness import RandomLoad, Simulation
from tests.unit.sched.test_scheduler_properties import SHAPES


@pytest.mark.parametrize("ahead", slow_but([1], [0, 1, 2]))
@pytest.mark.parametrize("shape", SHAPES)
def test_random_load(shape: str, ahead: int) -> None:
    """Oracle: the fake model; the harness compares the state before each chunk and decode with the row's tokens."""
    limits = replace(SHAPES[shape], has_states=True, enable_prefix_caching=False)
    simulation = Simulation(limits, ahead=ahead)
    load = RandomLoad(simulation, seed=len(shape) + ahead)
    for _ in range(300):
        load.act()
    simulation.run()


@pytest.mark.parametrize("ahead", slow_but([1], [0, 1, 2]))
@pytest.mark.parametrize("num_snapshots", slow_but([2], [0, 2, 20]))
@pytest.mark.parametrize("shape", SHAPES)
def test_random_load_with_snapshots(shape: str, num_snapshots: int, ahead: int) -> None:
    """Oracle: as above, with the prefix cache; snapshots are evicted and found."""
    limits = replace(SHAPES[shape], has_states=True, num_snapshots=num_snapshots)
    simulation = Simulation(limits, ahead=ahead)
    load = RandomLoad(simulation, seed=len(shape) + ahead)
    for _ in range(300):
        load.act()
    simulation.run()
    assert num_snapshots or simulation.scheduler.stats().num_prefix_hit_tokens == 0


def test_an_identical_prompt_begins_behind_its_last_block() -> None:
    """By hand, a prompt of 11 in blocks of 4: chunks of 8 and 3, a snapshot in the second plan; then 8 are cached.  All
    is forgotten on demand."""
    limits = replace(SHAPES["roomy"], has_states=True, num_snapshots=4, block_size=4, max_num_seqs=2)
    simulation = Simulation(limits)
    simulation.add(list(range(11)), max_tokens=2, ignore_eos=True)
    first, second = simulation.step(), simulation.step()
    assert first is not None and first.prefill_tokens.tolist() == [8] and not len(first.state_copies)
    assert second is not None and second.prefill_tokens.tolist() == [3]
    (source, slot), *rest = second.state_copies.tolist()
    assert source == 0 and slot >= 2 and not rest
    simulation.run()
    simulation.add(list(range(11)), max_tokens=2, ignore_eos=True)
    plan = simulation.step()
    assert plan is not None and plan.state_copies.tolist() == [[slot, 0]] and plan.prefill_tokens.tolist() == [3]
    assert plan.admitted[0].num_computed_tokens == 8
    simulation.run()
    assert simulation.scheduler.reset_prefix_cache()
    simulation.add(list(range(11)), max_tokens=2, ignore_eos=True)
    plan = simulation.step()
    assert plan is not None and plan.prefill_tokens.tolist() == [8]
    simulation.run()


def test_prompts_that_part() -> None:
    """By hand, 8 tokens in common: the first two compute them, the second takes a snapshot there; ten more that came
    with them wait for it."""
    limits = replace(SHAPES["roomy"], has_states=True, num_snapshots=20, max_num_seqs=16, max_num_batched_tokens=400)
    limits = replace(limits, block_size=4, num_blocks=200)
    simulation = Simulation(limits)
    for index in range(12):
        simulation.add([*range(8), *[10 + index] * 9], max_tokens=2, ignore_eos=True)
    plan = simulation.step()
    assert plan is not None and plan.prefill_tokens.tolist() == [16, 8]
    plan = simulation.step()
    assert plan is not None and plan.prefill_tokens.tolist() == [1, 8] and len(plan.state_copies) == 2
    plan = simulation.step()
    assert plan is not None and len(plan.admitted) == 10
    assert {admission.num_computed_tokens for admission in plan.admitted} == {8}
    simulation.run()
    assert simulation.scheduler.stats().num_prefix_hit_tokens == 80


def test_golden_forks_begin_with_the_state_before_the_last_token() -> None:
    """By hand, a prompt of 7 in blocks of 4: the donor stops at 6, where its siblings copy its state and block 1."""
    limits = replace(SHAPES["roomy"], has_states=True, enable_prefix_caching=False, block_size=4)
    simulation = Simulation(limits)
    simulation.add(list(range(7)), n=3, max_tokens=4, seed=5, ignore_eos=True)
    first, second = simulation.step(), simulation.step()
    assert first is not None and first.prefill_tokens.tolist() == [6] and not first.prefill_samples.any()
    assert second is not None and second.prefill_rows.tolist() == [0, 1, 2]
    assert second.prefill_tokens.tolist() == [1, 1, 1] and second.prefill_samples.all()
    assert second.state_copies.tolist() == [[0, 1], [0, 2]]
    assert second.copies.tolist() == [[1, 2], [1, 3]]
    simulation.run()
    assert simulation.worker.num_computed_tokens == 6 + 3 * (1 + 3)


def test_a_sibling_that_comes_too_late_computes_its_prompt() -> None:
    """By hand, two rows and n = 3: the third begins when one has ended, without a state to copy."""
    limits = replace(SHAPES["roomy"], has_states=True, enable_prefix_caching=False, max_num_seqs=2)
    simulation = Simulation(limits)
    simulation.add(list(range(7)), n=3, max_tokens=2, ignore_eos=True)
    simulation.run()
    assert sum(len(plan.state_copies) for plan in simulation.plans) == 1
    assert simulation.worker.num_computed_tokens == 6 + 2 * (1 + 1) + 7 + 1
