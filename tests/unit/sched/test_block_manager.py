"""Block tables, sharing and publishing.  Oracle: tables and slots worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.sched.scheduler_harness import limits
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.blocks.cache_keys import CacheKeys
from tp_engine.sched.request_validation import build_group
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Entry, Sequence, SequencePhase


@pytest.fixture
def batch() -> SchedulerState:
    """16 blocks of 4 tokens, 8 rows."""
    return SchedulerState(limits())


def make(
    batch: SchedulerState, prompt: list[int], number: int = 0, n: int = 1, salt: str | None = None
) -> list[Sequence]:
    """The waiting sequences of a request."""
    params = SamplingParams(n=n, cache_salt=salt)
    request = EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, params=params)
    group = build_group(request, batch.limits, number, number, CacheKeys())
    return [*group.sequences, *(group.make_next() for _ in range(group.num_unmade))]


def seat(batch: SchedulerState, sequence: Sequence) -> list[int]:
    """Admit with all hits and with room for all tokens; returns the hits."""
    hits = batch.blocks.find_hits(sequence)
    batch.blocks.pool.share(hits.shared.held)
    length, num_shared = len(sequence.token_ids), len(hits.shared.table)
    batch.enter([Entry(sequence, hits.shared, hits.num_tokens, length, None, num_shared, hits.place)], 1)
    batch.blocks.check_integrity()
    return list(map(int, hits.shared.held))


def find(batch: SchedulerState, sequence: Sequence) -> list[int]:
    """The cached blocks of a waiting sequence."""
    return list(map(int, batch.blocks.find_hits(sequence).shared.held))


def compute(batch: SchedulerState, sequence: Sequence, num_tokens: int) -> None:
    """The sequence's first ``num_tokens`` are computed, and published."""
    batch.rows.num_computed[sequence.row] = batch.rows.num_scheduled[sequence.row] = num_tokens
    batch.blocks.publish([(sequence, num_tokens)])
    batch.blocks.check_integrity()


def test_golden_tables(batch: SchedulerState) -> None:
    """By hand: 10 tokens take blocks 0-2, the next row 3; growth takes 4 and 5 in the order of the given rows."""
    (first,), (second,) = make(batch, list(range(10))), make(batch, [9, 9], number=1)
    seat(batch, first), seat(batch, second)
    assert batch.rows.held(0).tolist() == [0, 1, 2] and batch.rows.held(1).tolist() == [3]
    assert batch.blocks.grow_rows(np.array([1, 0], dtype=np.int32)).tolist() == [4, 5]
    assert batch.rows.held(0).tolist() == [0, 1, 2, 5] and batch.rows.held(1).tolist() == [3, 4]
    assert batch.rows.capacity[:2].tolist() == [16, 8]


def test_only_computed_full_blocks_are_published(batch: SchedulerState) -> None:
    """By hand, blocks of 4: 7 of 10 tokens computed cache one block, 10 cache two, and none before."""
    (first,) = make(batch, list(range(10)))
    seat(batch, first)
    (other,) = make(batch, list(range(12)), number=1)
    assert find(batch, other) == []
    compute(batch, first, 7)
    assert find(batch, other) == [0]
    compute(batch, first, 10)
    assert find(batch, other) == [0, 1]


def test_unconfirmed_tokens_are_not_published_on_leaving(batch: SchedulerState) -> None:
    """Oracle: a row that leaves between schedule and update publishes the confirmed tokens, not the sampled ones."""
    (first,) = make(batch, list(range(10)))
    seat(batch, first)
    compute(batch, first, 4)
    batch.rows.num_scheduled[first.row] = 10
    batch.leave(first, SequencePhase.FINISHED)
    (other,) = make(batch, list(range(12)), number=1)
    assert find(batch, other) == [0]


def test_hits_leave_one_token(batch: SchedulerState) -> None:
    """By hand: a fully cached prompt of 8 tokens uses one block, one of 9 tokens both."""
    (first,) = make(batch, list(range(12)))
    seat(batch, first)
    compute(batch, first, 12)
    assert find(batch, make(batch, list(range(8)), number=1)[0]) == [0]
    assert find(batch, make(batch, list(range(9)), number=2)[0]) == [0, 1]


def test_released_blocks_serve_hits_until_evicted(batch: SchedulerState) -> None:
    """By hand: a table is released tail first, so the head of the oldest survives longest; a hit takes it from the
    queue."""
    (first,) = make(batch, list(range(12)))
    seat(batch, first)
    compute(batch, first, 12)
    batch.leave(first, SequencePhase.FINISHED)
    pool = batch.blocks.pool
    assert pool.free_order() == [*range(3, 16), 2, 1, 0]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (13, 3, 0)
    (again,) = make(batch, list(range(12)), number=1)
    assert find(batch, again) == [0, 1]
    assert not pool.ref_counts[[0, 1]].any()
    assert seat(batch, again) == [0, 1]
    assert batch.rows.held(0).tolist() == [0, 1, 3]
    assert pool.free_order() == [*range(4, 16), 2]
    (big,) = make(batch, [7] * 52, number=2)
    seat(batch, big)
    assert pool.num_available == 0 and len(batch.blocks.cache.cached_blocks()) == 2
    (third,) = make(batch, list(range(12)), number=3)
    assert find(batch, third) == [0, 1], "used blocks stay in the cache"


def test_shared_blocks_count_their_holders(batch: SchedulerState) -> None:
    """By hand: two rows hold blocks 0 and 1; the second one that leaves releases them."""
    (first,), (second,) = make(batch, list(range(10))), make(batch, list(range(11)), number=1)
    seat(batch, first)
    compute(batch, first, 10)
    assert seat(batch, second) == [0, 1]
    assert [batch.blocks.pool.ref_counts[block] for block in range(4)] == [2, 2, 1, 1]
    batch.leave(first, SequencePhase.FINISHED)
    assert [batch.blocks.pool.ref_counts[block] for block in range(4)] == [1, 1, 0, 1]
    batch.leave(second, SequencePhase.FINISHED)
    assert batch.blocks.pool.num_used == 0


def test_equal_content_computed_twice_is_cached_once(batch: SchedulerState) -> None:
    """Oracle: two rows computed the same prompt: the first row's blocks are canonical, the other row's become plain
    free."""
    (first,), (second,) = make(batch, list(range(10))), make(batch, list(range(10)), number=1)
    seat(batch, first), seat(batch, second)
    compute(batch, first, 10)
    compute(batch, second, 10)
    batch.leave(second, SequencePhase.FINISHED)
    batch.leave(first, SequencePhase.FINISHED)
    assert batch.blocks.pool.num_cached == 2
    assert sorted(batch.blocks.cache.cached_blocks()) == [0, 1]


def test_salts_do_not_share(batch: SchedulerState) -> None:
    """Oracle: equal prompts of different tenants hold different blocks."""
    (first,) = make(batch, list(range(10)), salt="a")
    seat(batch, first)
    compute(batch, first, 10)
    assert find(batch, make(batch, list(range(10)), number=1, salt="b")[0]) == []
    assert find(batch, make(batch, list(range(10)), number=2)[0]) == []
    assert find(batch, make(batch, list(range(10)), number=3, salt="a")[0]) == [0, 1]


def test_victim_is_the_last_in_order(batch: SchedulerState) -> None:
    """By definition: lowest priority first, then latest arrival, then highest index."""
    groups = [make(batch, [1], number=0), make(batch, [2], number=1, n=2)]
    for sequence in groups[0] + groups[1]:
        seat(batch, sequence)
    assert batch.victim() is groups[1][1]
    batch.preempt(groups[1][1])
    assert batch.victim() is groups[1][0]
    assert batch.released == [2] and len(batch.waiting) == 1
