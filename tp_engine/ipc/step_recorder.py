"""Notes a rank's steps on its slot of the job's board, for the flight record.

::

    received           begin                 launched          done
    ----|----------------|---- model, sampling ---|-- results ---|---->
"""

from __future__ import annotations

import struct
import time
from typing import Final

from tp_engine.ipc.job_board import NUM_RECORDS, RECORD_FIELDS, RankSlot
from tp_engine.plan import StepPlan

_RECORD = struct.Struct("8qQ")
_WIDTH: Final = len(RECORD_FIELDS)
_STARTED, _LAUNCHED, _DONE = (RECORD_FIELDS.index(name) for name in ("started_ns", "launched_ns", "done_ns"))

assert _RECORD.size == 8 * _WIDTH


class StepRecorder:
    """Writes a rank's progress and records at the four points of a step's life; two microseconds in all."""

    def __init__(self, slot: RankSlot) -> None:
        self._slot = slot
        self._words = slot.words[-NUM_RECORDS * _WIDTH :]  # the records are the slot's end
        self._bytes = self._words.cast("B")

    def received(self, plan: StepPlan, num_bytes: int, checksum: int) -> None:
        """The plan is here (rank 0: is sent), ``num_bytes`` long as encoded, with its 64-bit checksum."""
        num_prefilled = int(plan.prefill_tokens.sum()) if len(plan.prefill_tokens) else 0
        counts = (plan.step_id, num_bytes, len(plan.decode_rows), num_prefilled)
        offset = plan.step_id % NUM_RECORDS * _RECORD.size
        _RECORD.pack_into(self._bytes, offset, *counts, time.monotonic_ns(), 0, 0, 0, checksum)
        self._slot.note_received(plan.step_id, checksum)

    def begin(self, step_id: int) -> None:
        """The step begins."""
        self._words[step_id % NUM_RECORDS * _WIDTH + _STARTED] = time.monotonic_ns()
        self._slot.begin_step(step_id)

    def launched(self, step_id: int) -> None:
        """The model and the sampler have been called; on a CPU they have also run."""
        self._words[step_id % NUM_RECORDS * _WIDTH + _LAUNCHED] = time.monotonic_ns()

    def done(self, step_id: int) -> None:
        """The step's results are on the host; on ranks other than 0, which see none, nothing is left to do."""
        self._words[step_id % NUM_RECORDS * _WIDTH + _DONE] = time.monotonic_ns()
        self._slot.end_step(step_id)
