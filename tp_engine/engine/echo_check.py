"""Rank 0 compares what every rank echoes with what it sent: a plan that got lost, repeated, corrupted or diverged.

When the result of step n is taken, every rank has begun step n, because the step's collectives do not end before all
ranks take part: so its echo of every plan up to n is there, and equal to rank 0's.  A rank may be ahead of n, by the
plans that are sent ahead; it is never behind.  Plans without tokens have no collective; they are compared together with
the next step that has some (the last dozen of them).  An echo may be a moment late to become visible (see
``job_board``): one that differs is looked at again before it counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from tp_engine.errors import PlanError
from tp_engine.ipc.job_board import NUM_ECHOES, JobBoard, split_echo

Echoes: TypeAlias = "Sequence[memoryview[int]]"

_PATIENCE_S: Final = 0.05
_MAX_AHEAD: Final = 4  # rank 0 may have sent so many plans beyond the step whose result it takes


class EchoCheck:
    """Compares the echoes of ranks 1 to N-1 with rank 0's own; those of the inputs too where ``checks_inputs``."""

    def __init__(self, board: JobBoard, *, checks_inputs: bool) -> None:
        self._plans = [slot.echoes for slot in board.slots]
        self._inputs = [slot.inputs for slot in board.slots] if checks_inputs else []
        self._checked = 0

    def check(self, step_id: int) -> None:
        """To be called with each result of a step that had tokens; ``PlanError`` names rank, step and both values."""
        if len(self._plans) == 1:
            return
        first = max(self._checked + 1, step_id - NUM_ECHOES + _MAX_AHEAD + 1)
        for one in range(first, step_id + 1):
            if not _agree(self._plans, one):
                raise PlanError(_difference(self._plans, one, "the plan", "sent"))
        self._checked = step_id
        if self._inputs and not _agree(self._inputs, step_id):
            raise PlanError(_difference(self._inputs, step_id, "inputs", "has"))


def _agree(echoes: Echoes, step_id: int) -> bool:
    """Whether all ranks have rank 0's word for ``step_id``, now or in a moment."""
    index = step_id % NUM_ECHOES
    expected = echoes[0][index]
    for words in echoes:
        if words[index] != expected:
            break
    else:
        return True
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        time.sleep(0.001)
        if all(words[index] == expected for words in echoes):
            return True
    return False


def _difference(echoes: Echoes, step_id: int, what: str, verb: str) -> str:
    index = step_id % NUM_ECHOES
    column = [words[index] for words in echoes]
    rank = next((rank for rank, word in enumerate(column) if word != column[0]), 0)
    (own_step, own), (step, value) = split_echo(column[0]), split_echo(column[rank])
    theirs = f"{value:#010x}" if step == own_step else f"{value:#010x} of step {step}"
    return (
        f"step {step_id}: the ranks have diverged: rank {rank} has {what} {theirs}, rank 0 {verb} {own:#010x} "
        f"(low halves of the checksums)"
    )
