"""The queue that blocks may leave from the middle.  Oracle: an ordered dictionary."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from tp_engine.sched.blocks.lru_queue import BlockIds, LruQueue


def ids(*blocks: int) -> BlockIds:
    """Block ids as the queue takes them."""
    return np.array(blocks, dtype=np.intp)


def test_golden_order() -> None:
    """By hand: first in, first out; a block that left the middle and returns is last."""
    queue = LruQueue(6)
    queue.append(ids(4, 0, 2, 5))
    queue.remove(ids(0, 5))
    queue.append(ids(1, 0))
    assert queue.order().tolist() == [4, 2, 1, 0] and len(queue) == 4
    assert queue.pop(2).tolist() == [4, 2]
    assert queue.pop(0).tolist() == []
    queue.remove(ids(1))
    assert queue.pop(1).tolist() == [0] and len(queue) == 0
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 in the queue"):
        queue.pop(1)


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 40])
def test_random_acts_match_an_ordered_dictionary(num_blocks: int) -> None:
    """Oracle: an ordered dictionary, over 2000 acts on a queue that is compacted many times; earlier results stay
    unchanged."""
    rng = random.Random(num_blocks)
    queue, model = LruQueue(num_blocks), OrderedDict[int, None]()
    given: list[tuple[BlockIds, list[int]]] = []
    for _ in range(2000):
        act = rng.choice(("append", "remove", "pop"))
        if act == "append":
            absent = [block for block in range(num_blocks) if block not in model]
            chosen = rng.sample(absent, rng.randint(0, len(absent)))
            queue.append(ids(*chosen))
            model.update(dict.fromkeys(chosen))
        elif act == "remove":
            chosen = rng.sample(list(model), rng.randint(0, len(model)))
            queue.remove(ids(*chosen))
            for block in chosen:
                del model[block]
        else:
            chosen = list(model)[: rng.randint(0, len(model))]
            given.append((queue.pop(len(chosen)), chosen))
            for block in chosen:
                del model[block]
        count = rng.randint(-1, num_blocks + 1)
        given.append((queue.peek(count), list(model)[: max(count, 0)]))
        assert queue.order().tolist() == list(model) and len(queue) == len(model)
        assert queue.holds(np.arange(num_blocks)).tolist() == [block in model for block in range(num_blocks)]
    assert all(popped.tolist() == chosen for popped, chosen in given)
