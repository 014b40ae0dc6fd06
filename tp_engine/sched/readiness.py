"""Why a sequence cannot be scheduled now: a bit for each reason, of each row and of each sequence that has none.

::

    reason     set when                                              cleared when
    MASK       a request with a grammar comes in; the result of a    the grammar is compiled, and the mask of the next
               step brings a row's token, which its grammar takes    token is there (``ConstrainedRows``)
    TOKEN      a row with a grammar is planned to be sampled         the result brings the token: the next mask needs it
    LOADING    a sequence enters whose K/V is in the host tier       the loads have gone out with a plan
    READING    a sequence could enter whose K/V is on disk           it is on the host, or time is up (``tier_waits``)

A sequence without a row that has a bit is in no queue.  A row with a bit is in no plan, but keeps its blocks, and can
be preempted like any other; MASK then goes with the sequence.  ``SchedulerState.unblock`` clears a bit.
"""

import enum

import numpy as np
import numpy.typing as npt

from tp_engine.plan import BoolArray, IntArray


class Blocked(enum.IntFlag):
    """The reasons."""

    NOTHING = 0
    MASK = 1
    TOKEN = 2
    LOADING = 4
    READING = 8


class Readiness:
    """``bits`` (rows,) uint8 of each row; ``num_blocked`` rows have any.  ``is_constrained`` (rows,) says which rows
    have a grammar, which is asked for a mask whenever they are sampled; ``num_constrained`` rows have one."""

    def __init__(self, num_rows: int) -> None:
        self.bits: npt.NDArray[np.uint8] = np.zeros(num_rows, dtype=np.uint8)
        self.is_constrained: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.num_blocked = 0
        self.num_constrained = 0

    def block(self, rows: IntArray | int, reason: Blocked) -> None:
        """Set the bit of ``reason`` for these rows, distinct."""
        bits = self.bits[rows]
        self.num_blocked += int(np.count_nonzero(bits == 0))
        self.bits[rows] = bits | reason.value

    def clear(self, rows: IntArray | int, reason: Blocked) -> None:
        """Clear the bit of ``reason`` for these rows, distinct, if they have it."""
        bits = self.bits[rows]
        left = bits & ~np.uint8(reason.value)
        self.num_blocked -= int(np.count_nonzero(bits)) - int(np.count_nonzero(left))
        self.bits[rows] = left

    def has(self, row: int, reason: Blocked) -> bool:
        """Return whether the row has the bit of ``reason``."""
        return bool(self.bits[row] & reason.value)

    def kept(self, row: int) -> Blocked:
        """Return the reasons that the row's sequence has wherever it is."""
        return Blocked(int(self.bits[row])) & Blocked.MASK

    def num_with(self, rows: IntArray, reason: Blocked) -> int:
        """Return how many of ``rows`` have the bit of ``reason``."""
        return int(np.count_nonzero(self.bits[rows] & reason.value))

    def are_ready(self, rows: IntArray) -> BoolArray:
        """Return which of ``rows`` have no bit."""
        ready: BoolArray = self.bits[rows] == 0
        return ready

    def occupy(self, row: int, *, is_constrained: bool) -> None:
        """Count a sequence without a bit that enters at ``row``."""
        self.is_constrained[row] = is_constrained
        self.num_constrained += is_constrained

    def vacate(self, row: int) -> None:
        """Count out the sequence that has left ``row``."""
        self.num_blocked -= int(self.bits[row] != 0)
        self.num_constrained -= int(self.is_constrained[row])
        self.bits[row] = 0
        self.is_constrained[row] = False

    def check_integrity(self, constrained: list[int], vacant: list[int]) -> None:
        """Assert that the counts are right, that just ``constrained`` rows have a grammar, and vacant ones no bit."""
        assert np.flatnonzero(self.is_constrained).tolist() == constrained
        assert self.num_constrained == len(constrained)
        assert self.num_blocked == np.count_nonzero(self.bits)
        assert not self.bits[vacant].any(), "a vacant row is blocked"
