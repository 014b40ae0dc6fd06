"""The slots of the host tier, by hand and over random acts."""

from __future__ import annotations

import random

import numpy as np

from tp_engine.features.tiers.tier_slots import NO_SLOT, TierSlots
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds


def ids(*numbers: int) -> BlockIds:
    """Blocks or slots as an array."""
    return np.array(numbers, dtype=np.intp)


def test_doubles_of_blocks_that_stay_go_before_any_sole_copy() -> None:
    """By hand, four slots: a sole copy, three doubles.  Of the doubles only block 5 is taken next; a slot for new
    content is that of the latest other one, and when only its double is left, the oldest sole copy goes."""
    slots = TierSlots(num_above=8, num_slots=4)
    taken, lost = slots.take(4, NO_BLOCKS)
    assert taken.tolist() == [0, 1, 2, 3] and not len(lost)
    slots.add_soles(taken[:1])
    slots.pair(ids(5, 6, 7), taken[1:])
    assert slots.num_used == 4
    again, lost = slots.take(1, ids(5))
    assert again.tolist() == [3] and not len(lost) and slots.slot_of[7] == NO_SLOT
    slots.add_soles(again)
    again, lost = slots.take(2, ids(5))
    assert again.tolist() == [2, 0] and lost.tolist() == [0]
    slots.add_soles(again)
    slots.check_integrity()
    assert slots.soles().tolist() == [3, 2, 0]


def test_a_lent_slot_stays_until_it_is_given_back() -> None:
    """By hand: of two sole copies one is lent to a load; no new content gets it, and then it doubles the block.  It is
    lent to a write too, and stays until both have given it back."""
    slots = TierSlots(num_above=4, num_slots=2)
    slots.add_soles(slots.take(2, NO_BLOCKS)[0])
    slots.lend(ids(0))
    slots.pair(ids(3), ids(0))
    slots.lend(ids(0))
    taken, lost = slots.take(2, NO_BLOCKS)
    assert taken.tolist() == lost.tolist() == [1]
    slots.add_soles(taken)
    slots.give_back(ids(0))
    slots.check_integrity()
    assert slots.take(1, NO_BLOCKS)[0].tolist() == [1]
    slots.add_soles(ids(1))
    slots.give_back(ids(0))
    slots.check_integrity()
    assert slots.take(1, NO_BLOCKS)[0].tolist() == [0]


def test_random_acts_lose_no_slot() -> None:
    """Oracle: every slot is in one state, after each of 500 acts; a cleared tier is empty."""
    rng = random.Random(3)
    slots = TierSlots(num_above=12, num_slots=9)
    for _ in range(500):
        dirty = [block for block in range(12) if slots.slot_of[block] == NO_SLOT]
        clean = [block for block in range(12) if slots.slot_of[block] != NO_SLOT]
        chosen = ids(*rng.sample(dirty, min(len(dirty), rng.randint(1, 4))))
        act = rng.randrange(4)
        if act == 0:
            taken, _ = slots.take(len(chosen), ids(*rng.sample(range(12), 3)))
            slots.pair(chosen[: len(taken)], taken)
        elif act == 1:
            slots.add_soles(slots.take(rng.randint(1, 3), NO_BLOCKS)[0])
        elif act == 2:
            blocks = ids(*rng.sample(clean, rng.randint(0, len(clean))))
            slots.add_soles(slots.part(blocks))
        elif len(soles := slots.soles()):
            pinned = soles[: len(chosen)]
            slots.lend(pinned)
            slots.pair(chosen[: len(pinned)], pinned)
            slots.give_back(pinned)
        slots.check_integrity()
    slots.clear()
    slots.check_integrity()
    assert slots.num_used == 0
