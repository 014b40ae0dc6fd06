"""A rank's steps, shown on its slot of the board: where it is, what it received, when."""

from __future__ import annotations

from tp_engine.ipc.job_board import RankSlot
from tp_engine.ipc.step_recorder import StepRecorder
from tp_engine.plan import StepPlan


class StepTrace:
    """To be called at the four points of a step's life; two microseconds in all."""

    def __init__(self, slot: RankSlot) -> None:
        self._slot = slot
        self._recorder = StepRecorder(slot)

    def received(self, plan: StepPlan, num_bytes: int, checksum: int) -> None:
        """The plan is here (rank 0: is sent), ``num_bytes`` long, with its 64-bit ``checksum``."""
        self._recorder.received(plan, num_bytes, checksum)
        self._slot.note_received(plan.step_id, checksum)

    def begin(self, step_id: int) -> None:
        """The step begins."""
        self._recorder.begin(step_id)
        self._slot.begin_step(step_id)

    def launched(self, step_id: int) -> None:
        """The model and the sampler have been called."""
        self._recorder.launched(step_id)

    def done(self, step_id: int) -> None:
        """Nothing of the step is left to do on this rank."""
        self._recorder.done(step_id)
        self._slot.end_step(step_id)
