"""Step plans from rank 0 to every other rank of this host: the codec over the ring, with the order checked."""

from __future__ import annotations

import math

import numpy as np

from tp_engine.errors import PlanError
from tp_engine.ipc.admission_codec import Buffer
from tp_engine.ipc.plan_codec import decode_plan, encode_plan, plan_checksum
from tp_engine.ipc.ring_buffer import Alive, RingReader, RingWriter, WriterAlive
from tp_engine.plan import NO_IDS, StepPlan

_REHEARSED_ROWS = 256


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
        self._last_rows = NO_IDS

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
        """Whether ``publish`` may have to wait for room although every plan before has been read.

        Only masks and the tokens of prompts are large.
        """
        num_bytes = plan.masks.nbytes + sum(one.token_ids.nbytes + one.block_ids.nbytes for one in plan.admitted)
        return num_bytes > self._ample_bytes

    def call(self) -> None:
        """Wake the ranks that are blocked, while the plan is made that they wait for."""
        self._ring.call()

    def publish(self, plan: StepPlan, timeout_s: float) -> None:
        """Send ``plan``; returns when it is in the ring, usually long before a rank reads it.

        ``RankError`` names a rank that has not read for ``timeout_s`` while the ring was full.
        """
        rows = plan.decode_rows
        data = encode_plan(plan, repeats_rows=rows is self._last_rows)
        self._ring.write(data, timeout_s)
        self._last, self._last_rows = data, rows

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
        self._ring = RingReader(name, index, spin_s=spin_s, alive=alive, on_call=self._rehearse)
        self._has_alive = alive is not None
        self._expected_step_id = first_step_id
        self._last: Buffer = b""
        self._last_rows = NO_IDS
        rows = np.arange(_REHEARSED_ROWS, dtype=np.int32)
        rehearsed = StepPlan(step_id=0, block_rows=rows[:16], block_ids=rows[:16], decode_rows=rows)
        self._rehearsal, self._rehearsed_rows = encode_plan(rehearsed, repeats_rows=True), rows

    @property
    def last_checksum(self) -> int:
        """The checksum in the last plan received, which its bytes agreed with; 0 before the first."""
        return plan_checksum(self._last) if self._last else 0

    @property
    def last_num_bytes(self) -> int:
        """Size of the last plan received, encoded; 0 before the first."""
        return len(self._last)

    def receive(self, timeout_s: float = math.inf) -> StepPlan:
        """The next plan.  An idle engine sends none for hours; without a deadline it is ``alive`` that ends the wait.

        ``RankError`` (rank 0) if none comes within ``timeout_s``; ``PlanError`` for a corrupted plan, with the step and
        both checksums, and for one that does not follow the last, with the expected and the received step id.
        """
        assert self._has_alive or timeout_s < math.inf, "a wait needs a deadline or a way to see that rank 0 is gone"
        data = self._ring.read(timeout_s)
        try:
            plan = decode_plan(data, self._last_rows)
        except PlanError as error:
            raise PlanError(f"step {self._expected_step_id}: {error}") from error
        if plan.step_id != self._expected_step_id:
            fault = "repeated" if plan.step_id < self._expected_step_id else "lost"
            raise PlanError(f"step plan {fault}: expected step {self._expected_step_id}, received step {plan.step_id}")
        self._expected_step_id += 1
        self._last, self._last_rows = data, plan.decode_rows
        return plan

    def close(self) -> None:
        """Unmap the ring."""
        self._ring.close()

    def _rehearse(self) -> None:
        """Decode some plan while rank 0 makes the next one: what that takes is then in this core's caches."""
        decode_plan(self._rehearsal, self._rehearsed_rows)
