"""Step plans from rank 0 to every other rank: encoded, sent through the ring of its host and once to each other host,
whose first rank passes them on (``relay.py``); checked for order by every rank.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

from tp_engine.errors import PlanError
from tp_engine.ipc.plan_codec import decode_plan, encode_plan, plan_checksum
from tp_engine.ipc.relay import PlanLink, RelayReader
from tp_engine.ipc.ring_buffer import RingReader, RingWriter
from tp_engine.plan import NO_IDS, StepPlan


class PlanPublisher:
    """Rank 0's end of the channel: the ``ring`` of its host, if it has other ranks, and ``links`` to other hosts.
    ``last_checksum`` and ``last_num_bytes`` are those of the last plan sent, to compare with what ranks received."""

    def __init__(self, ring: RingWriter | None, links: Sequence[PlanLink] = ()) -> None:
        self._ring, self._links = ring, tuple(links)
        rooms = [link.room_bytes for link in links] + ([] if ring is None else [ring.num_bytes // 2])
        self._ample_bytes = min(rooms)
        self.name = "" if ring is None else ring.name
        self.last_num_bytes = self.last_checksum = 0
        self._epoch = 0
        self._encoded: tuple[StepPlan, bytes] | None = None  # the last plan that was asked for, and its bytes

    def wait_attached(self, timeout_s: float) -> None:
        """Wait for all ranks of the host, then stop sharing the ring; ``RankError`` names those that are missing."""
        if self._ring is not None:
            self._ring.wait_attached(timeout_s)

    def may_block(self, plan: StepPlan) -> bool:
        """Return whether ``publish`` may have to wait for room although every plan before has been read."""
        self._encoded = plan, encode_plan(plan, self._epoch)
        return len(self._encoded[1]) > self._ample_bytes

    def call(self) -> None:
        """Wake the ranks of this host that are blocked, while rank 0 makes the plan that they wait for."""
        if self._ring is not None:
            self._ring.call()

    def publish(self, plan: StepPlan, timeout_s: float) -> None:
        """Send ``plan``, to other hosts first; returns when it is in the ring, usually long before a rank reads it.
        ``RankError`` names a rank that has not read for ``timeout_s`` while the ring was full."""
        encoded, self._encoded = self._encoded, None
        data = encoded[1] if encoded is not None and encoded[0] is plan else encode_plan(plan, self._epoch)
        for link in self._links:
            link.send(data, timeout_s)
        if self._ring is not None:
            self._ring.write(data, timeout_s)
        self.last_num_bytes, self.last_checksum = len(data), plan_checksum(data)
        self._epoch = plan.rows_epoch or self._epoch

    def close(self) -> None:
        for link in self._links:
            link.close()
        if self._ring is not None:
            self._ring.close()


MessageSource: TypeAlias = RingReader | RelayReader
"""Where plans come from, as bytes; ``RelayReader`` on the first rank of another host."""


class PlanSubscriber:
    """A reader's end of the channel; plans must start at ``first_step_id``."""

    def __init__(self, source: MessageSource, *, first_step_id: int = 1) -> None:
        self._source = source
        self._expected_step_id = first_step_id
        self.last_num_bytes = self.last_checksum = 0
        self._epoch, self._rows = 0, NO_IDS  # of the last plan that had an epoch

    def receive(self, timeout_s: float = math.inf) -> StepPlan:
        """Return the next plan.  An idle engine sends none for hours; without a deadline only rank 0's end ends the
        wait.  ``RankError`` (rank 0) if none comes within ``timeout_s``; ``PlanError`` for a corrupted plan, with the
        step and both checksums, and for one that does not follow the last, with the expected and the received step
        id."""
        assert self._source.has_alive or timeout_s < math.inf, (
            "a wait needs a deadline or a way to see that rank 0 is gone"
        )
        data = self._source.read(timeout_s)
        try:
            plan = decode_plan(data, self._epoch, self._rows)
        except PlanError as error:
            raise PlanError(f"step {self._expected_step_id}: {error}") from error
        if plan.step_id != self._expected_step_id:
            fault = "repeated" if plan.step_id < self._expected_step_id else "lost"
            raise PlanError(f"step plan {fault}: expected step {self._expected_step_id}, received step {plan.step_id}")
        self._expected_step_id += 1
        self.last_num_bytes, self.last_checksum = len(data), plan_checksum(data)
        if plan.rows_epoch:
            self._epoch, self._rows = plan.rows_epoch, plan.decode_rows
        return plan

    def close(self) -> None:
        self._source.close()
