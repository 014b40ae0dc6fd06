"""Rows and blocks that one client has beyond its part give way to the next sequence of another.

::

    who waits                                                   who gives way: the last of ...
    ----------------------------------------------------------  -------------------------------------------------
    a client that has few rows (an eighth of an even share)     the client that has the most, two more at least
    the first portion of a body (``waiting_queue``)             later portions of bodies of the same client

Otherwise rows would be handed on only as sequences end, and whoever fills all of them with long answers would keep
everybody else waiting as long.  What gives way waits in its client's queue; its full blocks stay cached.  A client's
first sequence never gives way, and a sequence makes others do so once at most, so every sequence comes to its end.
"""

from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.waiting_queue import PORTION

_SHARE = 8


class FairRows:
    """Looks whether the next sequence is due although there is no room for it, and makes some."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._seen = -1
        self._is_owed = False  # as of the queue's version ``_seen``

    @property
    def are_due(self) -> bool:
        """Whether another sequence must give way to the next one; asked before every step while any waits."""
        waiting = self._state.waiting
        sequence = waiting.peek()
        if sequence is None or self._has_room(sequence):
            return False
        if self._seen != waiting.version:
            self._seen, self._is_owed = waiting.version, self._debtor(sequence) is not None
        return self._is_owed

    def make_room(self) -> None:
        """Preempt for the next sequence.  No step may be in flight."""
        state = self._state
        sequence = state.waiting.peek()
        assert sequence is not None, "one is due"
        while not self._has_room(sequence) and (debtor := self._debtor(sequence)) is not None:
            state.preempt(debtor, "for a request of another client, or of a body that has few rows")
        sequence.has_displaced = True

    def _debtor(self, sequence: Sequence) -> Sequence | None:
        """Who gives way to ``sequence``, the next one; None if it must wait."""
        if sequence.has_displaced:
            return None
        state = self._state
        waiting, client = state.waiting, sequence.group.request.client
        if waiting.num_clients > 1:
            own, (most, largest) = waiting.num_rows(client), waiting.most_rows()
            part = max(1, state.limits.max_num_seqs // (_SHARE * waiting.num_clients))
            if own < part and most >= own + 2:
                last = self._last_of(largest)
                return last if max(0, last.key[0]) >= max(0, sequence.key[0]) else None
        if sequence.body_place < PORTION and waiting.num_rows(client):
            last = self._last_of(client)
            return last if last.body_place >= PORTION and last.key > sequence.key else None
        return None

    def _last_of(self, client: str) -> Sequence:
        running = self._state.rows.running()
        return max((one for one in running if one.group.request.client == client), key=lambda one: one.key)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether there is a row, and blocks for its prompt besides those that the running rows get in this step, and
        those that ``Admitter`` keeps for the next one."""
        rows, blocks = self._state.rows, self._state.blocks
        if not rows.num_vacant:
            return False
        num_growing = len(rows.at_block_end(rows.decoding())) + rows.num_running // blocks.block_size
        num_needed = num_growing * blocks.num_groups
        if rows.prefilling_rows:
            left = sum(int(rows.num_tokens[row] - rows.num_scheduled[row]) for row in rows.prefilling_rows)
            num_needed += blocks.most_blocks(min(left, self._state.limits.max_num_batched_tokens))
        return num_needed + blocks.most_blocks(len(sequence.token_ids)) <= blocks.pool.num_available
