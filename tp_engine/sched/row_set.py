"""Some rows of the batch, in the forms that a step uses as they are."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from tp_engine.plan import IntArray
from tp_engine.sched.sequence import Sequence


class RowSet:
    """``rows`` (n,) int32 and the ``sequences`` that sit there, in the rows' order.

    ``place`` is how to reach them in an array indexed by row: a slice if rows in rising order follow one another, as
    they mostly do, which costs numpy a fraction of the other form, indices (n,) intp.
    """

    def __init__(self, rows: IntArray, sequences: list[Sequence], *, is_rising: bool = False) -> None:
        self.rows = rows
        self.sequences = sequences
        first, count = int(rows[0]) if len(rows) else 0, len(rows)
        follow = is_rising and (count == 0 or int(rows[-1]) - first + 1 == count)
        self.place: slice | npt.NDArray[np.intp] = slice(first, first + count) if follow else rows.astype(np.intp)

    @cached_property
    def names(self) -> tuple[list[str], list[int]]:
        """Request id of each sequence, and its index among the request's.  Not to be changed."""
        return [one.request_id for one in self.sequences], [one.index for one in self.sequences]
