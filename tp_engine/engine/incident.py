"""Who ended the job: read from the board, told in words."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from tp_engine.errors import RankError
from tp_engine.ipc.job_board import JobBoard, RankSlot, State
from tp_engine.progress import RankPhase

ExitCode: TypeAlias = Callable[[int], int | None]
"""How a rank's process ended (negative: by a signal), where this process is its parent; else None."""

_TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Incident:
    """``rank`` ended the job; ``message`` says how, ``details`` are its last words (a traceback, or nothing)."""

    rank: int
    message: str
    details: str = ""

    def error(self) -> RankError:
        """The error for the caller: with the end of the last words."""
        lines = self.details.rstrip().splitlines()[-_TAIL_LINES:]
        return RankError(self.rank, "\n  | ".join([self.message, *lines]))


def find_incident(board: JobBoard, own_rank: int, gone: Collection[int], exit_code: ExitCode) -> Incident | None:
    """Who is behind what can be seen now; None while nobody has failed.  ``gone``: ranks whose process has ended.

    ::

        a process that ended without a word (killed)          is the cause, whatever the others say
        else the first that failed by itself                  is the cause; later failures follow from it
        else whom the first failure blames                    is the cause, this rank itself maybe
    """
    silent = [rank for rank in gone if board.slots[rank].state not in (State.LEFT, State.FAILED)]
    if silent:
        return _told(board.slots[silent[0]], silent[0] in gone, exit_code)
    failed = sorted((slot for slot in board.slots if slot.state == State.FAILED), key=lambda slot: slot.failed_ns)
    cause = next((slot for slot in failed if slot.blamed_rank is None), None)
    if cause is not None:
        return None if cause.rank == own_rank else _told(cause, cause.rank in gone, exit_code)
    if not failed or all(slot.rank == own_rank for slot in failed):
        return None
    first = next(slot for slot in failed if slot.rank != own_rank)
    blamed = first.blamed_rank
    assert blamed is not None
    return Incident(blamed, f"{where(board.slots[blamed])}; rank {first.rank} reports:", first.failure_text)


def where(slot: RankSlot) -> str:
    """``'in load'``, ``'in collective 3 of step 12'``, ``'waiting for step 13'``."""
    if slot.state == State.ABSENT:
        return "not there yet"
    phase, step = slot.phase, slot.step_started
    if phase >= RankPhase.STEP_BEGIN and phase != RankPhase.SHUTDOWN:
        if slot.busy_since_ns == 0:
            return f"waiting for step {slot.step_done + 1} (last phase: {phase.label})"
        which = f" {slot.count}" if phase == RankPhase.COLLECTIVE else ""
        return f"in {phase.label}{which} of step {step}"
    return f"in {phase.label}"


def describe_exit(code: int) -> str:
    """``-9`` -> ``'signal 9'``, ``1`` -> ``'exit code 1'``."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _told(slot: RankSlot, is_gone: bool, exit_code: ExitCode) -> Incident:
    code, process = exit_code(slot.rank), f"process {slot.pid}" if slot.pid else "its process"
    if code is not None:
        how = f"{process} ended with {describe_exit(code)}"
    else:
        how = f"{process} is gone" if is_gone else f"{process} failed"
    return Incident(slot.rank, f"{how}, {where(slot)}", slot.failure_text)
