"""The scheduler's view for people: the grid of blocks and the running sequences, both bounded."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.unit.sched.scheduler_harness import Simulation
from tp_engine.sched.scheduler import SchedulerLimits
from tp_engine.sched.view import PoolGrid, ViewLimits, shorten

LIMITS = SchedulerLimits(
    num_blocks=30, block_size=4, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=60, enable_prefix_caching=True
)


def unpack(grid: PoolGrid) -> list[int]:
    packed = np.frombuffer(grid.cells, dtype=np.uint8)
    cells = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)
    return list(map(int, cells[: grid.num_cells]))


def expected_states(simulation: Simulation) -> list[int]:
    """The states by the pool's own reference counts and marks."""
    pool = simulation.scheduler.state.blocks.pool
    counts = [pool.ref_counts[block] for block in range(pool.num_blocks)]
    return [min(count, 2) + 1 if count else int(pool.contents()[block]) for block, count in enumerate(counts)]


def test_the_grid_shows_every_block() -> None:
    """Oracle: the pool's reference counts and content marks, over a random mix with hits, forks and preemptions."""
    simulation, chance, seen = Simulation(LIMITS), random.Random(3), set()
    prefix = [chance.randrange(50) for _ in range(16)]
    for round_ in range(60):
        if round_ % 3 == 0:
            prompt = prefix[: chance.randrange(1, 17)] + [chance.randrange(50) for _ in range(5)]
            simulation.add(prompt, max_tokens=chance.randrange(1, 20), n=chance.choice((1, 1, 2)))
        simulation.step()
        view = simulation.scheduler.view(ViewLimits())
        states = unpack(view.grid)
        assert states == expected_states(simulation)
        seen.update(states)
        for one in view.running:
            assert one.num_blocks == len(one.blocks) and all(states[block] >= 2 for block in one.blocks)
            assert one.num_shared_blocks == sum(states[block] == 3 for block in one.blocks)
    assert seen == {0, 1, 2, 3}


def test_running_sequences_with_their_tables() -> None:
    """Oracle: 6 prompt tokens and 3 generated ones in blocks of 4: two blocks hold the 8 computed tokens; a third
    appears when the ninth is scheduled."""
    simulation = Simulation(LIMITS)
    simulation.add([1, 2, 3, 4, 5, 6], request_id="x" * 100, priority=5, max_tokens=9, ignore_eos=True)
    for _ in range(3):
        simulation.step()
    (one,) = simulation.scheduler.view(ViewLimits()).running
    assert (one.request_id, one.index, one.phase, one.priority) == ("x" * 23 + "…", 0, "decode", 5)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.num_computed_tokens) == (6, 3, 8)
    assert (one.num_blocks, one.blocks) == (2, [0, 1])


def test_a_view_is_bounded() -> None:
    """Oracle: the given limits: 2 of 4 sequences, 1 block of each table, and a grid of 8 cells of 4 blocks."""
    simulation = Simulation(LIMITS)
    for number in range(4):
        simulation.add([number] * 10, max_tokens=5, ignore_eos=True)
    simulation.step()
    simulation.step()
    view = simulation.scheduler.view(ViewLimits(max_cells=8, max_sequences=2, max_blocks=1))
    assert (len(view.running), view.num_omitted) == (2, 2)
    assert all(len(one.blocks) == 1 and one.num_blocks == 3 for one in view.running)
    assert (view.grid.num_blocks, view.grid.blocks_per_cell, view.grid.num_cells) == (30, 4, 8)
    states = [*expected_states(simulation), 0, 0]
    assert unpack(view.grid) == [max(states[first : first + 4]) for first in range(0, 32, 4)]


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 5, 16384, 16385, 100_000])
def test_grids_of_every_size(num_blocks: int) -> None:
    """Oracle: the cells cover all blocks, there are at most 16384, and a byte holds four."""
    simulation = Simulation(dataclasses.replace(LIMITS, num_blocks=num_blocks))
    grid = simulation.scheduler.view(ViewLimits()).grid
    assert grid.num_cells <= 16384 and (grid.num_cells - 1) * grid.blocks_per_cell < num_blocks
    assert grid.num_cells * grid.blocks_per_cell >= num_blocks and len(grid.cells) == -(-grid.num_cells // 4)
    assert not any(grid.cells)


def test_ids_are_cut_short() -> None:
    """Oracle: 24 characters at most."""
    assert shorten("a" * 24) == "a" * 24 and shorten("a" * 25) == "a" * 23 + "…"
