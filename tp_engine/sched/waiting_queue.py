"""Sequences that wait for a row, in order of priority, then arrival."""

from __future__ import annotations

import heapq

from tp_engine.sched.sequence import OrderKey, Sequence, SequencePhase


class WaitingQueue:
    """A heap by ``Sequence.key``: push and pop cost O(log n).

    An aborted sequence is only counted out; it leaves the heap when it comes up, or when half of the heap is dead.
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
        """Take the first living one."""
        while self._heap:
            sequence = heapq.heappop(self._heap)[1]
            if sequence.phase is SequencePhase.WAITING:
                return sequence
            self._num_dead -= 1
        return None

    def forget(self, sequence: Sequence) -> None:
        """A queued sequence has been aborted."""
        assert sequence.phase is SequencePhase.FINISHED
        self._num_dead += 1
        if self._num_dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].phase is SequencePhase.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def check_integrity(self) -> None:
        """Assert that the count of the dead is right and that nothing is queued twice."""
        assert sum(entry[1].phase is not SequencePhase.WAITING for entry in self._heap) == self._num_dead
        assert len({entry[0] for entry in self._heap}) == len(self._heap)
