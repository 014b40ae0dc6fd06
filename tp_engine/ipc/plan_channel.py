"""Step plans from rank 0 to every other rank of this host: encoded, sent through the ring, checked for order."""

from __future__ import annotations

import math

from tp_engine.errors import PlanError
from tp_engine.ipc.plan_codec import decode_plan, encode_plan, encoded_size, plan_checksum
from tp_engine.ipc.plan_sections import Buffer
from tp_engine.ipc.ring_buffer import Alive, RingReader, RingWriter, WriterAlive
from tp_engine.plan import NO_IDS, StepPlan


class PlanPublisher:
    """Rank 0's end of the channel, for ``num_readers`` other ranks; see ``RingWriter`` for the options.

    ``last_checksum`` and ``last_num_bytes`` are those of the last plan sent, to compare with what each rank received.
    """

    def __init__(
        self,
        num_readers: int,
        *,
        num_slots: int = 64,
        slot_bytes: int = 65536,
        spin_s: float | None = None,
        alive: Alive | None = None,
    ) -> None:
        self._ring = RingWriter(num_readers, num_slots=num_slots, slot_bytes=slot_bytes, spin_s=spin_s, alive=alive)
        self._ample_bytes = num_slots * slot_bytes // 2
        self.name = self._ring.name
        self._last: Buffer = b""
        self._epoch = 0

    @property
    def last_checksum(self) -> int:
        """The checksum in the last plan sent; 0 before the first."""
        return plan_checksum(self._last) if self._last else 0

    @property
    def last_num_bytes(self) -> int:
        """Size of the last plan sent, encoded; 0 before the first."""
        return len(self._last)

    def wait_attached(self, timeout_s: float) -> None:
        """Wait for all ranks, then stop sharing the ring; ``RankError`` names the ranks that are missing."""
        self._ring.wait_attached(timeout_s)

    def may_block(self, plan: StepPlan) -> bool:
        """Whether ``publish`` may have to wait for room although every plan before has been read."""
        return encoded_size(plan) > self._ample_bytes

    def call(self) -> None:
        """Wake the ranks that are blocked, while rank 0 makes the plan that they wait for."""
        self._ring.call()

    def publish(self, plan: StepPlan, timeout_s: float) -> None:
        """Send ``plan``; returns when it is in the ring, usually long before a rank reads it.

        ``RankError`` names a rank that has not read for ``timeout_s`` while the ring was full.
        """
        data = encode_plan(plan, self._epoch)
        self._ring.write(data, timeout_s)
        self._last, self._epoch = data, plan.rows_epoch or self._epoch

    def close(self) -> None:
        """Unmap the ring."""
        self._ring.close()


class PlanSubscriber:
    """Reader ``index`` (rank ``index + 1``) of the channel ``name``; plans must start at ``first_step_id``.

    ``alive()``, asked every half second of a wait, is False once rank 0's process is known to be gone.
    """

    def __init__(
        self,
        name: str,
        index: int,
        *,
        first_step_id: int = 1,
        spin_s: float | None = None,
        alive: WriterAlive | None = None,
    ) -> None:
        self._ring = RingReader(name, index, spin_s=spin_s, alive=alive)
        self._has_alive = alive is not None
        self._expected_step_id = first_step_id
        self._last: Buffer = b""
        self._epoch, self._rows = 0, NO_IDS  # of the last plan that had an epoch

    @property
    def last_checksum(self) -> int:
        """The checksum in the last plan received, which its bytes agreed with; 0 before the first."""
        return plan_checksum(self._last) if self._last else 0

    @property
    def last_num_bytes(self) -> int:
        """Size of the last plan received, encoded; 0 before the first."""
        return len(self._last)

    def receive(self, timeout_s: float = math.inf) -> StepPlan:
        """The next plan.  An idle engine sends none for hours; without a deadline only ``alive`` ends the wait.

        ``RankError`` (rank 0) if none comes within ``timeout_s``; ``PlanError`` for a corrupted plan, with the step and
        both checksums, and for one that does not follow the last, with the expected and the received step id.
        """
        assert self._has_alive or timeout_s < math.inf, "a wait needs a deadline or a way to see that rank 0 is gone"
        data = self._ring.read(timeout_s)
        try:
            plan = decode_plan(data, self._epoch, self._rows)
        except PlanError as error:
            raise PlanError(f"step {self._expected_step_id}: {error}") from error
        if plan.step_id != self._expected_step_id:
            fault = "repeated" if plan.step_id < self._expected_step_id else "lost"
            raise PlanError(f"step plan {fault}: expected step {self._expected_step_id}, received step {plan.step_id}")
        self._expected_step_id += 1
        self._last = data
        if plan.rows_epoch:
            self._epoch, self._rows = plan.rows_epoch, plan.decode_rows
        return plan

    def close(self) -> None:
        """Unmap the ring."""
        self._ring.close()
