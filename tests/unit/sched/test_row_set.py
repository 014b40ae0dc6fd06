"""Rows in the forms that a step uses: a slice selects the same rows as indices."""

from __future__ import annotations

import numpy as np
import pytest

from tp_engine.sched.decode_run import RowSet


@pytest.mark.parametrize("rows", [[], [0], [5], [0, 1, 2], [3, 4, 5, 6], [0, 2], [1, 2, 5], [0, 1, 3, 4, 7]])
def test_rising_rows_reach_their_entries(rows: list[int]) -> None:
    """Oracle: entry by entry; it is a slice exactly when the rows are consecutive."""
    chosen = RowSet(np.array(rows, dtype=np.int32), [], is_rising=True)
    values = np.arange(100, 108)
    assert values[chosen.place].tolist() == [100 + row for row in rows]
    assert isinstance(chosen.place, slice) == (rows == list(range(min(rows, default=0), max(rows, default=-1) + 1)))


def test_rows_in_another_order_keep_it() -> None:
    """Oracle: prefills after decodes may be in any row, so ends that look like a run prove nothing."""
    chosen = RowSet(np.array([2, 7, 4], dtype=np.int32), [])
    assert np.arange(8)[chosen.place].tolist() == [2, 7, 4]
