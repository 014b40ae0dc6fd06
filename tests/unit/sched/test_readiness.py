"""The bits that say why a row cannot be scheduled.  Oracle: counts by hand."""

from __future__ import annotations

import numpy as np

from tp_engine.sched.readiness import Blocked, Readiness


def test_a_row_is_ready_when_its_last_bit_is_cleared() -> None:
    """By hand: two reasons for row 1, one for row 2; clearing a bit that is not set changes nothing."""
    readiness = Readiness(4)
    readiness.block(np.array([1, 2], dtype=np.int32), Blocked.TOKEN)
    readiness.block(1, Blocked.LOADING)
    assert readiness.num_blocked == 2
    assert readiness.are_ready(np.arange(4, dtype=np.int32)).tolist() == [True, False, False, True]
    readiness.clear(np.array([0, 1, 2], dtype=np.int32), Blocked.TOKEN)
    assert readiness.num_blocked == 1 and readiness.has(1, Blocked.LOADING)
    readiness.clear(1, Blocked.LOADING)
    readiness.check_integrity([], [0, 3])
    assert readiness.num_blocked == 0


def test_a_row_that_is_vacated_takes_its_bits_along() -> None:
    """By hand: the next sequence at the row begins without a bit."""
    readiness = Readiness(2)
    readiness.occupy(0, is_constrained=True)
    readiness.block(0, Blocked.TOKEN)
    readiness.vacate(0)
    readiness.check_integrity([], [0, 1])
    assert (readiness.num_blocked, readiness.num_constrained) == (0, 0)
