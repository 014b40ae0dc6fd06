"""Prefix blocks that a scheduled step is computing and that will be published when its result is in."""

from __future__ import annotations

from tp_engine.sched.sequence import Sequence


class PendingBlocks:
    """Hashes of blocks being completed, with the step that completes them.

    A request that could use such a block next waits instead of computing the same prefix once more.  It waits for one
    step per run of cached blocks, so for at most as many steps as its prompt has blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._step_of: dict[int, int] = {}

    def add(self, sequence: Sequence, start: int, end: int, step_id: int) -> None:
        """The step ``step_id`` computes the sequence's tokens ``start`` to ``end`` (exclusive)."""
        if sequence.parent is not None:
            size = self._block_size
            self._step_of.update(dict.fromkeys(sequence.hashes[start // size : end // size], step_id))

    def worth_waiting(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether the block behind the sequence's hits is being computed; counts as a deferral if so."""
        usable = (len(sequence.token_ids) - 1) // self._block_size
        if num_hits >= min(usable, len(sequence.hashes)):
            return False
        step_id = self._step_of.get(sequence.hashes[num_hits])
        awaited = (num_hits, step_id)
        if step_id is None or (awaited != sequence.deferred_for and num_hits <= sequence.deferred_for[0]):
            return False
        sequence.deferred_for = (num_hits, step_id)
        return True

    def settle(self, step_id: int) -> None:
        """The results up to ``step_id`` are in: what they completed is published, or never will be."""
        if self._step_of:
            self._step_of = {name: step for name, step in self._step_of.items() if step > step_id}
