"""Sets of ``custom_id`` at 16 bytes each: which lines repeat one, and which have a result already.

::

    digests   16 bytes per id, in the order in which they were added; as an array (N, 2) of two 64-bit words
    order     positions, sorted by the first word; of equal ids the first added comes first

Two different ids have the same digest with a chance of about 1e-25 in ten million.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_DIGEST_BYTES = 16


class CustomIds:
    """Ids in the order in which they were added; only their digests are kept."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def __len__(self) -> int:
        return len(self._digests) // _DIGEST_BYTES

    def add(self, custom_id: str) -> None:
        """Append one."""
        self._digests += blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()

    def repeated(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions of ids that were added before, and for each of them the position where it was first."""
        if not len(self):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        words = self._words()
        order = np.argsort(words[:, 0], kind="stable")
        sorted_words = words[order, 0]
        likely = np.flatnonzero(sorted_words[1:] == sorted_words[:-1]) + 1
        same = likely[words[order[likely], 1] == words[order[likely - 1], 1]]
        # A run of equal ids at places p, p + 1, p + 2 of the order: ``same`` has p + 1 and p + 2, the first is at p.
        run_starts = np.ones(len(same), dtype=bool)
        run_starts[1:] = same[1:] != same[:-1] + 1
        starts = np.maximum.accumulate(np.where(run_starts, same - 1, 0))
        return order[same], order[starts]

    def positions_in(self, others: CustomIds) -> npt.NDArray[np.int64]:
        """For each id its position in ``others``, or -1."""
        if not len(self) or not len(others):
            return np.full(len(self), -1, dtype=np.int64)
        words, other_words = self._words(), others._words()
        order = np.argsort(other_words[:, 0], kind="stable")
        places = np.searchsorted(other_words[order, 0], words[:, 0])
        found = order[np.minimum(places, len(order) - 1)]
        is_there = (other_words[found] == words).all(axis=1)
        return np.where(is_there, found, -1)

    def _words(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._digests, dtype=np.uint64).reshape(-1, 2)
