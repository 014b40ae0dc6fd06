"""Groups of layers with windows, whole lives by hand.  Oracle: tables worked out by hand, and the fake worker, which
checks what each group may read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.unit.sched.scheduler_harness import Simulation, limits
from tp_engine.errors import RequestError
from tp_engine.plan import StepPlan, StepResult
from tp_engine.sched.view import ViewLimits

ENDLESS: dict[str, Any] = {"ignore_eos": True}


def table(simulation: Simulation, row: int = 0) -> list[list[int]]:
    """The blocks that a row holds, group by group."""
    rows = simulation.scheduler.state.rows
    tables = rows.tables(row)
    return [tables[first:, group].tolist() for group, first in enumerate(rows.first_block[row].tolist())]


def num_used(simulation: Simulation) -> int:
    return simulation.scheduler.stats().num_used_blocks


def without_model(plan: StepPlan) -> StepResult:
    """The result of a step, at once."""
    return StepResult(step_id=plan.step_id, token_ids=np.ones(len(plan.sampled_rows), dtype=np.int32))


def test_golden_a_window_gives_blocks_back_when_its_row_grows() -> None:
    """By hand, blocks and tiles of 4, a window of 4: at position 8 the tile of key 5 is read, at 12 that of key 9.

    So the first block is released at 8; it belongs to the prompt and stays cached.  The second is released at 12; it is
    not cached, and the full group takes it at once.
    """
    simulation = Simulation(limits(windows=(None, 4), tile_tokens=4))
    simulation.add([1] * 7, max_tokens=30, **ENDLESS)
    first = simulation.step()
    assert first is not None and first.admitted[0].block_ids.tolist() == [0, 1, 2, 3]
    assert table(simulation) == [[0, 2], [1, 3]]
    simulation.step()
    third = simulation.step()
    assert third is not None and (third.block_rows.tolist(), third.block_ids.tolist()) == ([0], [4, 5])
    assert table(simulation) == [[0, 2, 4], [3, 5]]
    for _ in range(4):
        plan = simulation.step()
    assert plan is not None and plan.block_ids.tolist() == [3, 6]
    assert table(simulation) == [[0, 2, 4, 3], [5, 6]]
    simulation.run()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_long_sequence_of_a_windowed_model_lives_in_a_small_pool(ahead: int) -> None:
    """By hand: a window of 8 and its tile take four blocks of 4; 900 tokens go through a pool of six."""
    simulation = Simulation(limits(windows=(8,), tile_tokens=4, num_blocks=6, max_model_len=900), ahead=ahead)
    prompt = [number % 50 for number in range(700)]
    simulation.add(prompt, max_tokens=None, **ENDLESS)
    while simulation.step() is not None:
        assert num_used(simulation) <= 6
    simulation.check_idle()
    assert len(simulation.outputs["r0", 0].token_ids) == 200
    assert simulation.scheduler.stats().num_preemptions == 0


def test_five_windows_of_six_take_a_quarter_of_the_blocks() -> None:
    """Oracle: the blocks of six full groups, of 32k tokens each; windows of 1,024 and chunks of 1,024."""
    shape = limits(
        windows=(None, *[1024] * 5),
        tile_tokens=128,
        block_size=16,
        num_blocks=12_400,
        max_num_batched_tokens=1024,
        max_model_len=32_768,
    )
    simulation = Simulation(shape, checks=False)
    simulation.worker.execute = without_model  # type: ignore[method-assign]
    simulation.add([number % 50 for number in range(32_700)], max_tokens=None, **ENDLESS)
    most = 0
    while simulation.step() is not None:
        most = max(most, num_used(simulation))
    assert 2048 < most <= 0.25 * 6 * 32_768 // 16


def test_golden_a_hit_needs_the_last_blocks_of_a_window_only() -> None:
    """By hand, blocks and tiles of 4, a window of 4: behind 16 known tokens, key 13 is the first visible key.  So the
    full group shares blocks 0 to 3 and the other group only the fourth; the rest of its table is 0 and not held."""
    simulation = Simulation(limits(windows=(None, 4), tile_tokens=4, num_blocks=40))
    simulation.add([1] * 16, max_tokens=1)
    simulation.run()
    simulation.add([1] * 18, max_tokens=1)
    plan = simulation.step(between=lambda: _expect(simulation))
    assert plan is not None and plan.admitted[0].num_computed_tokens == 16
    assert plan.admitted[0].block_ids.reshape(-1, 2)[:4].tolist() == [[0, 0], [2, 0], [4, 0], [6, 7]]
    simulation.run()


def _expect(simulation: Simulation) -> None:
    assert [len(blocks) for blocks in table(simulation)] == [5, 2]


def test_a_window_that_lost_a_block_shortens_the_hit_to_where_it_suffices() -> None:
    """By hand: the window's fourth of five known blocks of 4 is reused.  A window of 8 needs the last two blocks, so
    hits of four and of five blocks both lack the fourth.  Computing both puts it back."""
    simulation = Simulation(limits(windows=(None, 8), tile_tokens=4, num_blocks=40))
    simulation.add([1] * 20, max_tokens=1)
    simulation.run()
    cache, pool = simulation.scheduler.state.blocks.cache, simulation.scheduler.state.blocks.pool
    (known, _) = cache.match("", b"\1\0\0\0" * 20, 5)
    lost = known[3:4, 1].copy()
    pool._kept.remove(lost)
    pool._content[lost] = 0
    pool._free[pool.num_free : pool.num_free + 1] = lost
    pool.num_free += 1
    cache.evict(lost)
    simulation.scheduler.check_integrity()
    for expected in (12, 20):
        simulation.add([1] * 22, max_tokens=1)
        plan = simulation.step()
        assert plan is not None and plan.admitted[0].num_computed_tokens == expected
        simulation.run()


def test_a_fork_needs_a_donor_that_still_holds_its_window() -> None:
    """By hand: one row is free when the first of two outputs begins.  When the second is admitted, the first is eleven
    tokens further and its window of 4 has left the prompt behind, so the second begins with hits, not as a fork."""
    simulation = Simulation(limits(windows=(None, 4), tile_tokens=4, num_blocks=60, max_num_seqs=2))
    simulation.add([9] * 3, max_tokens=12, **ENDLESS)
    simulation.step()
    simulation.add([1] * 10, n=2, max_tokens=24, **ENDLESS)
    plans = []
    while simulation.scheduler.has_unfinished:
        plan = simulation.step()
        assert plan is not None
        plans.append(plan)
    admitted = [admission for plan in plans for admission in plan.admitted]
    assert [admission.num_computed_tokens for admission in admitted] == [0, 8]
    assert sum(len(plan.copies) for plan in plans) == 0
    simulation.check_idle()


def test_golden_forks_and_tails_are_copied_in_every_group() -> None:
    """By hand, blocks of 4, two groups: a fork's last token falls into block 2, 3, which it copies to 4, 5; requests
    that continue an ended one copy its last blocks."""
    simulation = Simulation(limits(windows=(None, 8), tile_tokens=4, num_blocks=40))
    simulation.add([1] * 6, n=2, max_tokens=2, will_continue=True, **ENDLESS)
    simulation.step()
    plan = simulation.step()
    assert plan is not None and plan.copies.tolist() == [[2, 4], [3, 5]]
    assert plan.admitted[0].block_ids.tolist() == [0, 1, 4, 5]
    simulation.run()
    for token in (8, 9):
        simulation.add([*[1] * 6, simulation.outputs["r0", 0].token_ids[0], token], max_tokens=1)
    plan = simulation.step()
    assert plan is not None and [one.num_computed_tokens for one in plan.admitted] == [7, 7]
    assert len(plan.copies) == 4 and len(set(plan.copies[:, 0].tolist())) == 2
    simulation.run()


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    """By hand: 10 blocks of 4 and a window that takes 4 of them leave 6 for the full group: 24 tokens."""
    simulation = Simulation(limits(windows=(None, 8), tile_tokens=4, num_blocks=10))
    with pytest.raises(
        RequestError, match=r"25 tokens; the KV cache holds 24 .*10 blocks of 4, one for each of 2 groups"
    ):
        simulation.add([1] * 25)
    simulation.add([1] * 24, max_tokens=None, **ENDLESS)
    simulation.run()
    assert len(simulation.outputs["r0", 0].token_ids) == 1


def test_two_that_fill_the_pool_finish_one_after_the_other() -> None:
    """By hand: the first in order always fits alone: two of the longest sequences share a pool that holds just one."""
    simulation = Simulation(limits(windows=(None, 8), tile_tokens=4, num_blocks=10, max_num_seqs=2))
    for token in (1, 2):
        simulation.add([token] * 20, max_tokens=5, **ENDLESS)
    simulation.run()
    assert simulation.outputs["r0", 0].finish_reason == simulation.outputs["r1", 0].finish_reason


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("windows", [(1,), (8,), (None, 1), (None, 8, 24)])
def test_fragmentation_and_the_view_know_all_groups(windows: tuple[int | None, ...], ahead: int) -> None:
    """By definition: live tokens are between zero and all slots of used blocks; the view counts the used blocks and
    shows held blocks."""
    shape = limits(windows=windows, tile_tokens=2, block_size=3, num_blocks=60)
    simulation, rng = Simulation(shape, ahead=ahead), random.Random(2)
    for number in range(40):
        if number % 4 == 0:
            simulation.add([number % 3] * rng.randint(1, 30), n=rng.choice((1, 2)), max_tokens=20, **ENDLESS)
        simulation.step()
        stats = simulation.scheduler.stats()
        assert 0 <= stats.fragmentation <= 1 and 0 <= stats.num_live_tokens <= stats.num_used_blocks * 3
        view = simulation.scheduler.view(ViewLimits())
        pool = simulation.scheduler.state.blocks.pool
        for one in view.running:
            assert one.num_blocks == len(one.blocks) and all(pool.ref_counts[block] for block in one.blocks)
        states = [view.grid.cells[block // 4] >> 2 * (block % 4) & 3 for block in range(60)]
        assert sum(state >= 2 for state in states) == stats.num_used_blocks
    simulation.run()
