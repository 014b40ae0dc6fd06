"""Rank 0 compares what every rank echoes with what it sent: a plan that got lost, repeated, corrupted or diverged.

When the result of step n is taken, every rank has begun step n, because the step's collectives do not end before all
ranks take part: so its echo of every plan up to n is there, and equal to rank 0's.  A rank may be ahead of n, by the
plans that are sent ahead; it is never behind.  Plans without tokens have no collective; they are compared together with
the next step that has some (the last dozen of them).  An echo may be a moment late to become visible (see
``job_board``): one that differs is looked at again before it counts.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_engine.errors import PlanError
from tp_engine.ipc.job_board import NUM_ECHOES, JobBoard, split_echo

_PATIENCE_S: Final = 0.05
_MAX_AHEAD: Final = 4  # rank 0 may have sent so many plans beyond the step whose result it takes


class EchoCheck:
    """Compares rows 1 to N-1 of the board's echoes with row 0, rank 0's own; ``inputs`` too where ``checks_inputs``."""

    def __init__(self, board: JobBoard, *, checks_inputs: bool) -> None:
        self._plans = board.echoes
        self._inputs = board.inputs if checks_inputs else None
        self._checked = 0

    def check(self, step_id: int) -> None:
        """To be called with each result of a step that had tokens; ``PlanError`` names rank, step and both values."""
        first = max(self._checked + 1, step_id - NUM_ECHOES + _MAX_AHEAD + 1)
        for one in range(first, step_id + 1):
            if not _agree(self._plans, one):
                raise PlanError(_difference(self._plans, one, "the plan", "sent"))
        self._checked = step_id
        if self._inputs is not None and not _agree(self._inputs, step_id):
            raise PlanError(_difference(self._inputs, step_id, "inputs", "has"))


def _agree(echoes: npt.NDArray[np.int64], step_id: int) -> bool:
    """Whether all ranks have rank 0's word for ``step_id``."""
    column = echoes[:, step_id % NUM_ECHOES]
    if (column == column[0]).all():
        return True
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        time.sleep(0.001)
        if (column == column[0]).all():
            return True
    return False


def _difference(echoes: npt.NDArray[np.int64], step_id: int, what: str, verb: str) -> str:
    column = echoes[:, step_id % NUM_ECHOES].tolist()
    rank = next((rank for rank, word in enumerate(column) if word != column[0]), 0)
    (own_step, own), (step, value) = split_echo(column[0]), split_echo(column[rank])
    theirs = f"{value:#010x}" if step == own_step else f"{value:#010x} of step {step}"
    return (
        f"step {step_id}: the ranks have diverged: rank {rank} has {what} {theirs}, rank 0 {verb} {own:#010x} "
        f"(low halves of the checksums)"
    )
