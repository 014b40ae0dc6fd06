"""The free queue, block by block.  Oracle: orders worked out by hand from the rule in the pool's docstring."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from tp_engine.sched.blocks.block_pool import BlockPool
from tp_engine.sched.blocks.lru_queue import BlockIds


def ids(*blocks: int) -> BlockIds:
    """Block ids as the pool takes them."""
    return np.array(blocks, dtype=np.intp)


def take(pool: BlockPool, count: int) -> tuple[list[int], list[int]]:
    """Take blocks; returns them, and those whose content is lost."""
    taken, lost = pool.allocate(count)
    return taken.tolist(), lost.tolist()


def order(pool: BlockPool) -> list[int]:
    """The queue's order, after a check of the pool."""
    pool.check_integrity()
    return pool.free_order()


def test_golden_order_without_hashes() -> None:
    """By hand: blocks are taken in rising order; a released table is taken again first, in its own order."""
    pool = BlockPool(6)
    assert order(pool) == [0, 1, 2, 3, 4, 5]
    assert take(pool, 4) == ([0, 1, 2, 3], [])
    pool.release(ids(1, 3))
    assert order(pool) == [1, 3, 4, 5]
    pool.release(ids(2, 0))
    assert order(pool) == [2, 0, 1, 3, 4, 5]


def test_golden_eviction_takes_tails_before_heads() -> None:
    """By hand: free blocks go first, then the older table's tail, then its head, and last the younger table's."""
    pool = BlockPool(6)
    first, _ = pool.allocate(3)
    second, _ = pool.allocate(2)
    pool.mark_full(ids(0, 1, 3, 4))
    pool.release(first)
    assert order(pool) == [2, 5, 1, 0]
    pool.release(second)
    assert order(pool) == [2, 5, 1, 0, 4, 3]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 4, 0)
    assert take(pool, 4) == ([2, 5, 1, 0], [1, 0])
    assert order(pool) == [4, 3]
    assert not pool.contents()[0] and pool.contents()[4]


def test_golden_hit_leaves_the_middle_of_the_queue() -> None:
    """By hand: a shared cached block leaves the middle of the queue, and returns as the most recently used."""
    pool = BlockPool(4)
    pool.allocate(3)
    pool.mark_full(ids(0, 1, 2))
    pool.release(ids(0, 1, 2))
    assert order(pool) == [3, 2, 1, 0]
    pool.share(ids(1))
    assert order(pool) == [3, 2, 0]
    pool.share(ids(1))
    pool.release(ids(1))
    assert order(pool) == [3, 2, 0] and pool.ref_counts[1] == 1
    pool.release(ids(1))
    assert order(pool) == [3, 2, 0, 1]


def test_golden_tails_go_after_free_blocks_and_before_full_ones() -> None:
    """By hand: the older tail first, then the other, both before a full block that was cached earlier."""
    pool = BlockPool(6)
    pool.allocate(5)
    pool.mark_full(ids(0))
    pool.release(ids(0))
    for block in (3, 1):
        pool.mark_tail(ids(block))
        pool.release(ids(block))
    assert order(pool) == [5, 3, 1, 0]
    pool.release(ids(2))
    assert order(pool) == [2, 5, 3, 1, 0]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 3, 1)
    assert take(pool, 3) == ([2, 5, 3], [3])
    assert take(pool, 2) == ([1, 0], [1, 0])


def test_content_forgotten_keeps_the_order() -> None:
    """By hand: cached blocks become free where they are in the queue."""
    pool = BlockPool(3)
    pool.allocate(2)
    pool.mark_full(ids(0))
    pool.release(ids(0, 1))
    pool.forget_content()
    assert order(pool) == [1, 2, 0] and pool.num_free == 3
    assert take(pool, 3) == ([1, 2, 0], [])


def test_misuse_is_our_fault() -> None:
    """Oracle: an assertion for taking too many, for releasing a block that no row holds, for sharing one without
    content."""
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="no row holds"):
        pool.release(ids(0))
    with pytest.raises(AssertionError, match="nothing to share"):
        pool.share(ids(1))
    with pytest.raises(AssertionError, match=r"blocks \[1\] have \[0\] holders"):
        pool.mark_tail(ids(1))


def test_random_acts_match_a_plain_model() -> None:
    """Oracle: ordered dictionaries as the queues and plain lists of holders, over 3000 random acts."""
    rng = random.Random(3)
    pool, spare, kept = BlockPool(12), OrderedDict.fromkeys(range(12)), OrderedDict[int, None]()
    tables: list[list[int]] = []
    hashed: set[int] = set()
    tails: set[int] = set()
    for _ in range(3000):
        act = rng.choice(("take", "hash", "share", "release", "release", "end"))
        if act == "take" and (spare or kept):
            wanted = [*spare, *kept][: rng.randint(1, len(spare) + len(kept))]
            assert take(pool, len(wanted)) == (wanted, [block for block in wanted if block in hashed | tails])
            tables.append(wanted)
            for block in wanted:
                spare.pop(block, None)
                kept.pop(block, None)
                hashed.discard(block)
                tails.discard(block)
        elif act == "hash" and tables:
            block = rng.choice(rng.choice(tables))
            pool.mark_full(ids(block))
            hashed.add(block)
        elif act == "share" and hashed:
            shared = sorted(hashed)[: rng.randint(1, 3)]
            pool.share(ids(*shared))
            tables.append(shared)
            for block in shared:
                kept.pop(block, None)
        elif act in ("release", "end") and tables:
            table = tables.pop(rng.randrange(len(tables)))
            if act == "end" and table[-1] not in hashed and not any(table[-1] in other for other in tables):
                pool.mark_tail(ids(table[-1]))
                tails.add(table[-1])
            pool.release(ids(*table))
            for block in reversed(table):
                if not any(block in other for other in tables):
                    queue = kept if block in hashed else spare
                    queue[block] = None
                    queue.move_to_end(block, last=block in hashed | tails)
        assert order(pool) == [*spare, *kept]
