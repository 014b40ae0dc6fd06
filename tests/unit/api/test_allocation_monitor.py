"""The allocation monitor: its samples, its bounds, its sums."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.sched.scheduler_harness import Simulation
from tp_engine.api.allocation_monitor import AllocationMonitor
from tp_engine.sched.scheduler import SchedulerLimits

LIMITS = SchedulerLimits(
    num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, enable_prefix_caching=True
)


def test_a_sample_is_the_pool_as_it_stands() -> None:
    """Oracle: 6 tokens in 2 blocks of 4: fragmentation 1 - 6/8; after the end, one full block is cached."""
    simulation, monitor = Simulation(LIMITS), AllocationMonitor()
    simulation.add([1, 2, 3, 4, 5, 6], max_tokens=2, ignore_eos=True)
    monitor.observe(empty := simulation.scheduler.stats(), 0.0)
    assert (empty.num_free_blocks, empty.fragmentation, empty.usage) == (8, 0.0, 0.0)
    simulation.step()
    monitor.observe(used := simulation.scheduler.stats(), 1.0)
    assert (used.num_free_blocks, used.num_cached_blocks, used.num_used_blocks, used.num_live_tokens) == (6, 0, 2, 6)
    assert used.fragmentation == pytest.approx(1 - 6 / 8) and used.usage == 2 / 8
    simulation.run()
    monitor.observe(ended := simulation.scheduler.stats(), 2.0)
    assert (ended.num_free_blocks, ended.num_cached_blocks, ended.num_used_blocks) == (7, 1, 0)
    assert monitor.latest is ended and list(monitor) == [(0.0, empty), (1.0, used), (2.0, ended)]
    summary = monitor.summary()
    assert (summary.num_samples, summary.span_s, summary.peak_usage) == (3, 2.0, 0.25)
    assert summary.mean_usage == pytest.approx(0.25 / 3)
    assert summary.peak_fragmentation == summary.mean_fragmentation == pytest.approx(0.25)


def test_the_history_is_bounded() -> None:
    """Oracle: the newest five of a hundred samples."""
    stats, monitor = Simulation(LIMITS).scheduler.stats(), AllocationMonitor(max_samples=5)
    for number in range(100):
        monitor.observe(dataclasses.replace(stats, num_live_tokens=number), float(number))
    assert [stats.num_live_tokens for _, stats in monitor] == [95, 96, 97, 98, 99] and len(monitor) == 5


def test_the_interval_says_when_a_sample_is_due() -> None:
    """Oracle: the first sample is due at once, the next two seconds later."""
    stats, monitor = Simulation(LIMITS).scheduler.stats(), AllocationMonitor(interval_s=2.0)
    assert monitor.is_due(-5.0) and monitor.latest is None and monitor.summary().num_samples == 0
    monitor.observe(stats, 10.0)
    assert not monitor.is_due(11.9) and monitor.is_due(12.0)
