"""The job's board: one small shared segment, in which every rank shows where it is and each process can look.

::

    byte 0    | magic | world size | created, monotonic ns | ranks per host | host | ... 64
    byte 64   | slot of rank 0 | slot of rank 1 | ... | slot of rank N-1 |                  see ``rank_slot.py``

Every host has a board of its own, with slots for the ranks of all hosts: those of its own ranks are shared memory as
above, those of the others are copies (``board_mirror.py``).  Rank 0 also uses it to compare what every rank received
with what it sent (``EchoCheck``).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.errors import PlanError, RankError
from tp_engine.ipc.rank_slot import NUM_ECHOES, RECORD_FIELDS, SLOT_WORDS, RankSlot, echo_word, split_echo
from tp_engine.ipc.segment import Segment, create_segment, open_segment
from tp_engine.job.topology import Topology

Echoes: TypeAlias = "Sequence[memoryview[int]]"

_MAGIC = 0x31647261_6F627074  # "tpboard1"
_HEADER_WORDS = 8
_PATIENCE_S: Final = 0.05
_STEP, _CHECKSUM = RECORD_FIELDS.index("step_id"), RECORD_FIELDS.index("plan_checksum")
_MAX_AHEAD: Final = 4  # at most this many plans beyond the step whose result rank 0 takes have been sent


class JobBoard(Segment):
    """The board of ``host`` in one process; ``create`` makes it on the host's first rank, ``open`` maps it."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        super().__init__(memory, descriptor)
        words = memoryview(memory).cast("q")
        table = np.frombuffer(memory, np.int64)
        self.world_size, self.created_ns, self.host = words[1], words[2], words[4]
        self.topology = Topology(world_size=words[1], local_world_size=words[3])
        starts = [_HEADER_WORDS + rank * SLOT_WORDS for rank in range(self.world_size)]
        self.slots = tuple(
            RankSlot(rank, words[start : start + SLOT_WORDS], table[start : start + SLOT_WORDS])
            for rank, start in enumerate(starts)
        )
        local = self.topology.ranks_of(self.host)
        self.local_slots = self.slots[local.start : local.stop]
        self.far_slots = self.slots[: local.start] + self.slots[local.stop :]

    @classmethod
    def create(cls, world_size: int, *, local_world_size: int | None = None, host: int = 0) -> JobBoard:
        """Return a new board, of ``host`` where there are several; ``RuntimeError`` where /dev/shm is too small."""
        memory, descriptor = create_segment(
            8 * (_HEADER_WORDS + world_size * SLOT_WORDS), num_ranks=local_world_size or world_size
        )
        header = memoryview(memory).cast("q")
        header[1], header[2] = world_size, time.monotonic_ns()
        header[3], header[4] = local_world_size or world_size, host
        header[0] = _MAGIC
        return cls(memory, descriptor)

    @classmethod
    def open(cls, address: str) -> JobBoard:
        """Return the board at ``address``; ``RankError`` (rank 0) if its creator has ended or no longer shares it."""
        try:
            memory = open_segment(address)
        except FileNotFoundError as error:
            raise RankError(0, f"it has ended in import or group_init: its board {address} is gone") from error
        header = memoryview(memory).cast("q")
        assert header[0] == _MAGIC, f"{address} is not a board: its magic is {header[0]:#x}, not {_MAGIC:#x}"
        return cls(memory)


class EchoCheck:
    """Compares the echoes of the other ranks with rank 0's own, and with ``checks_inputs`` those of the inputs too.

    It finds a plan that was lost, repeated or corrupted, and ranks that have diverged.  When rank 0 takes the result of
    step n, every rank has begun step n, because the step's collectives end only after all ranks take part: the rank's
    echo of every plan up to n is there, and equal to rank 0's.  A rank may be ahead of n, by the plans that are sent
    ahead; it is never behind.  A plan without tokens has no collective, so it is compared together with the next step
    that has tokens (at most the last dozen of them).  An echo may become visible a moment late (see ``rank_slot``): one
    that differs is read again before it counts.

    The ranks of other hosts are compared as their slots arrive, by ``compare_far``; the next ``check`` raises.
    """

    def __init__(self, board: JobBoard, *, checks_inputs: bool) -> None:
        self._own = board.slots[0]
        self._plans = [slot.echoes for slot in board.local_slots]
        self._inputs = [slot.inputs for slot in board.local_slots] if checks_inputs else []
        self._checked = 0
        self._far_difference = ""

    def check(self, step_id: int) -> None:
        """Called with each result of a step that had tokens; ``PlanError`` names the rank, the step and both values."""
        if self._far_difference:
            raise PlanError(self._far_difference)
        if len(self._plans) == 1:
            return
        first = max(self._checked + 1, step_id - NUM_ECHOES + _MAX_AHEAD + 1)
        for one in range(first, step_id + 1):
            if (rank := _differing(self._plans, one)) is not None:
                raise PlanError(_difference(one, rank, "the plan", "sent", self._plans[0], self._plans[rank]))
        self._checked = step_id
        if self._inputs and (rank := _differing(self._inputs, step_id)) is not None:
            raise PlanError(_difference(step_id, rank, "inputs", "has", self._inputs[0], self._inputs[rank]))

    def compare_far(self, slot: RankSlot, records: npt.NDArray[np.int64]) -> None:
        """``slot``, of another host's rank, has just arrived with ``records`` (steps, fields) of steps that have ended.
        Plans are compared in every step, inputs in the last few before each arrival."""
        own, last = self._own.records[records[:, _STEP] % len(self._own.records)], self._own.step_done
        differs = (own[:, _STEP] == records[:, _STEP]) & (own[:, _CHECKSUM] != records[:, _CHECKSUM])
        for mine, theirs in zip(own[differs].tolist(), records[differs].tolist(), strict=True):
            if mine[_STEP] <= last:
                words = [[echo_word(row[_STEP], row[_CHECKSUM])] * NUM_ECHOES for row in (mine, theirs)]
                self._note_far(mine[_STEP], slot.rank, "the plan", "sent", *words)
        if not self._inputs:
            return
        for mine, theirs in zip(self._own.inputs, slot.inputs, strict=True):
            (step_id, _), (far_step, _) = split_echo(mine), split_echo(theirs)
            if step_id == far_step and mine != theirs and step_id <= min(last, slot.step_done):
                self._note_far(step_id, slot.rank, "inputs", "has", self._own.inputs, slot.inputs)

    def _note_far(self, step_id: int, rank: int, *values: Any) -> None:
        self._far_difference = self._far_difference or _difference(step_id, rank, *values)


def _differing(echoes: Echoes, step_id: int) -> int | None:
    """The first rank that has another word for ``step_id`` than rank 0, now and after ``_PATIENCE_S``; None if all have
    the same."""
    index = step_id % NUM_ECHOES
    expected = echoes[0][index]
    for words in echoes:
        if words[index] != expected:
            break
    else:
        return None
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        rank = next((rank for rank, words in enumerate(echoes) if words[index] != expected), None)
        if rank is None or time.monotonic() > deadline_s:
            return rank
        time.sleep(0.001)


def _difference(step_id: int, rank: int, what: str, verb: str, mine: Sequence[int], theirs: Sequence[int]) -> str:
    """The difference between rank 0's echoes and those of ``rank``, in words."""
    (own_step, own), (step, value) = (split_echo(words[step_id % NUM_ECHOES]) for words in (mine, theirs))
    shown = f"{value:#010x}" if step == own_step else f"{value:#010x} of step {step}"
    return (
        f"step {step_id}: the ranks have diverged: rank {rank} has {what} {shown}, rank 0 {verb} {own:#010x} "
        f"(low halves of the checksums)"
    )
