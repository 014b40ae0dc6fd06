"""The queue in which sequences wait for a row, in order of (priority, arrival, index).

A request with a grammar waits outside of it until that is compiled (``readiness``).
"""

from __future__ import annotations

import heapq

from tp_engine.sched.sequence import OrderKey, Sequence, SequencePhase


class WaitingQueue:
    """Sequences that wait for a row, a heap by ``Sequence.key``: push and pop cost O(log n).

    An aborted sequence stays in the heap and is only counted as dead; it goes when it comes up, or when half of the
    heap is dead.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, Sequence]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, sequence: Sequence) -> None:
        """Add at its place, which for a preempted sequence is before all that arrived later."""
        assert sequence.phase is SequencePhase.WAITING
        heapq.heappush(self._heap, (sequence.key, sequence))

    def pop(self) -> Sequence | None:
        """Remove and return the first living one; None if there is none."""
        while self._heap:
            sequence = heapq.heappop(self._heap)[1]
            if sequence.phase is SequencePhase.WAITING:
                return sequence
            self._num_dead -= 1
        return None

    def first(self, count: int) -> list[Sequence]:
        """The first ``count`` of the queue, without those among them that were aborted.

        They are on the first ``count`` levels of the heap.
        """
        items = heapq.nsmallest(count, self._heap[: (1 << count) - 1])
        return [sequence for _, sequence in items if sequence.phase is SequencePhase.WAITING]

    def forget(self, sequence: Sequence) -> None:
        """A queued sequence has been aborted."""
        assert sequence.phase is SequencePhase.FINISHED
        self._num_dead += 1
        if self._num_dead * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[1].phase is SequencePhase.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def check_integrity(self) -> None:
        """Assert that the count of the dead is right and that nothing is queued twice."""
        assert sum(item[1].phase is not SequencePhase.WAITING for item in self._heap) == self._num_dead
        assert len({item[0] for item in self._heap}) == len(self._heap)
