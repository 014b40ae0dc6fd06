"""What ranks tell rank 0 about work that no step waits for: how far they are, and what failed.  No message, no lock.

Such work (checked stores into the host tier, reads and writes of the disk tier) is ordered by plans, and each kind of
it is a *channel*.  Every rank counts the operations of a channel from 1 on in the order of the plans, so a number means
the same on all ranks, and need not be sent.  A rank ends them in this order, and says so in the channel's words in its
slot of the job's board::

    word 0         failures so far << 40 | operations ended      one store, so both are seen together
    words 1 ..     failure i, at i mod 128: i << 40 | its number

Rank 0 reads the words whenever it wants to know.  An operation has ended when all ranks have ended it, and has failed
if it failed on any.  A word of the ring that another rank has written may become visible after word 0.  As it carries
its own index, rank 0 sees that, and counts the rank's operations as not ended until the next look.

If a rank fails more than 128 times between two looks, the ring has lost some of these failures.  Then all operations
that this rank ended between the two looks count as failed.  The tiers lose cached blocks by that,
and never take a failed one for a good one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TIER_CHANNELS = ("stores", "disk_reads", "disk_writes")
_RING = 128
CHANNEL_WORDS = 1 + _RING
_SHIFT = 40
_NUMBERS = (1 << _SHIFT) - 1
_FAILURES = (1 << 63 - _SHIFT) - 1


class TierProgress:
    """One rank's side of a channel; ``words`` are ``CHANNEL_WORDS`` of its slot.  For one thread."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words
        self._num_ended = words[0] & _NUMBERS
        self._num_failed = words[0] >> _SHIFT

    @property
    def num_ended(self) -> int:
        """Operations that have ended on this rank, which is the number of the last of them."""
        return self._num_ended

    def end(self, count: int = 1, failed: Sequence[int] = ()) -> None:
        """Enter that the next ``count`` operations have ended; ``failed`` are the numbers of those that failed."""
        for number in failed:
            assert self._num_ended < number <= self._num_ended + count, f"operation {number} has not just ended"
            self._words[1 + self._num_failed % _RING] = (self._num_failed & _FAILURES) << _SHIFT | number
            self._num_failed += 1
        self._num_ended += count
        self._words[0] = (self._num_failed & _FAILURES) << _SHIFT | self._num_ended


class TierReport(NamedTuple):
    """All operations up to number ``ended`` have ended on all ranks; ``failed``, rising, failed on some rank and were
    not reported before."""

    ended: int
    failed: tuple[int, ...]


class TierProgressReader:
    """Rank 0's side of a channel, ``ranks`` being the words of all ranks."""

    def __init__(self, ranks: Sequence[memoryview[int]]) -> None:
        self._ranks = ranks
        self._num_seen = [0] * len(ranks)  # failures of each rank
        self._ended = [0] * len(ranks)
        self._failed: set[int] = set()  # not reported: not ended on all ranks yet

    def poll(self) -> TierReport:
        """Return what has ended since the last call; some tenths of a microsecond per rank."""
        for rank, words in enumerate(self._ranks):
            word = words[0]
            if word & _NUMBERS != self._ended[rank]:
                self._look_at(rank, word)
        ended = min(self._ended)
        if not self._failed:
            return TierReport(ended, ())
        failed = tuple(sorted(number for number in self._failed if number <= ended))
        self._failed.difference_update(failed)
        return TierReport(ended, failed)

    def _look_at(self, rank: int, word: int) -> None:
        seen, words = self._num_seen[rank], self._ranks[rank]
        num_new = ((word >> _SHIFT) - seen) & _FAILURES
        failed: list[int] = []
        for index in range(seen, seen + min(num_new, _RING)):
            entry = words[1 + index % _RING]
            age = ((entry >> _SHIFT) - index) & _FAILURES
            if age and age % _RING == 0 and age <= _FAILURES // 2:
                num_new = _RING + 1  # written again since word 0 was read
                break
            if age or not entry & _NUMBERS:
                return  # not visible yet
            failed.append(entry & _NUMBERS)
        if num_new > _RING:
            word = words[0]
            failed = list(range(self._ended[rank] + 1, (word & _NUMBERS) + 1))
        self._failed.update(failed)
        self._num_seen[rank], self._ended[rank] = word >> _SHIFT, word & _NUMBERS
