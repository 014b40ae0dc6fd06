"""The job's board: one small shared segment in which every rank shows where it is, and everybody can look.

::

    byte 0    | magic | world size | created, wall clock ns | created, monotonic ns | unused ... 64
    byte 64   | slot of rank 0 | slot of rank 1 | ... | slot of rank N-1 |

    a slot, in words of 8 bytes                                                            written by
      0 pid                      8 state                                                    the rank itself
      1 process start, ticks     9 count << 8 | phase (see ``faults``)                       the rank itself
      2 heartbeat, ns           10 step started          12 step received                   the rank itself
      3 process CPU time, ns    11 step done             13 busy since, ns (0: idle)        the rank itself
      4 failed at, ns            5 rank blamed + 1        6 bytes of failure text           the rank itself
     15 time in collectives, ns (host tensors; 0 where a device does them)                  the rank itself
     14 exit code + 1000                                                                    its parent, rank 0
     16..31 echo of step s at s mod 16: step id << 32 | low half of the plan's checksum     the rank itself
     32..47 the same with the digest of the step's inputs (only where that is asked for)    the rank itself
     48..   the memory ledger, bytes: ``MEMORY_LINES``, then the sum of all other lines      the rank itself
      then  the phases of the start, us: ``STARTUP_PHASES``, then the sum of all others      the rank itself
      then  failure text, 8 KiB; then 512 records of 9 words: step s at s mod 512            the rank itself

The ledger is all 0 before it is known; a phase that a rank has not is 0.

There is no lock.  Each word has one writing process and is an aligned 8-byte store and load (``memoryview`` and numpy
copy an item of that size at once), which x86-64 and ARM never tear.  Nothing here orders two words, and nobody depends
on an order: an echo carries its step id in the same word; a record that is being written shows a moment's mixture to
people; the failure text counts once its length is there, and is read again when the process has ended, which the kernel
orders.  Whoever concludes something fatal from a word looks twice, some time apart: a store becomes visible at last.

Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_engine.errors import RankError
from tp_engine.ipc.segment import Segment, create_segment, open_segment
from tp_engine.progress import RankPhase, split_phase

NUM_RECORDS: Final = 512
RECORD_FIELDS = (
    "step_id", "plan_bytes", "decode_rows", "prefill_tokens",
    "received_ns", "started_ns", "launched_ns", "done_ns", "plan_checksum",
)  # fmt: skip
MEMORY_LINES = (
    "total", "requested", "weights", "activations", "non_torch", "tables", "cuda_graphs", "kv_cache_available",
    "kv_cache",
)  # fmt: skip
STARTUP_PHASES = (
    "opening the device", "first snapshot", "sharing memory", "sharing memory between GPUs", "loading weights",
    "packing weights", "warming up", "measuring CUDA graphs", "profiling memory", "allocating the KV cache",
    "recording decode steps",
)  # fmt: skip
OTHER: Final = "other"  # the sum of the memory lines, or of the phases, that have no word of their own
NUM_ECHOES: Final = 16
PHASE_WORD: Final = 9
COLLECTIVE_WORD: Final = 15

_MAGIC = 0x31647261_6F627074  # "tpboard1"
_HEADER_WORDS = 8
_TEXT_BYTES = 8192
_ECHO = 16
_INPUTS = _ECHO + NUM_ECHOES
_MEMORY = _INPUTS + NUM_ECHOES
_STARTUP = _MEMORY + len(MEMORY_LINES) + 1
_TEXT = _STARTUP + len(STARTUP_PHASES) + 1
_RECORDS = _TEXT + _TEXT_BYTES // 8
_SLOT_WORDS = _RECORDS + NUM_RECORDS * len(RECORD_FIELDS)
_EXIT_BIAS = 1000
_HALF = 0xFFFFFFFF


class State(IntEnum):
    """Where a rank's process is in its life; ``FAILED`` and ``LEFT`` are final.

    ::

        ABSENT -> STARTING -> READY -> STOPPING -> LEFT
                      \\_________\\_________\\______> FAILED
    """

    ABSENT = 0
    STARTING = 1
    READY = 2
    STOPPING = 3
    LEFT = 4
    FAILED = 5


class RankSlot:
    """One rank's slot.  The rank itself writes, everybody reads; ``words`` is the slot as 8-byte integers.

    ``echoes`` and ``inputs``: 16 words each, see ``echo_word``.
    """

    def __init__(self, rank: int, words: memoryview[int], table: npt.NDArray[np.int64]) -> None:
        self.rank = rank
        self.words = words
        self.echoes = words[_ECHO : _ECHO + NUM_ECHOES]
        self.inputs = words[_INPUTS : _INPUTS + NUM_ECHOES]
        self.records = table[_RECORDS:].reshape(NUM_RECORDS, len(RECORD_FIELDS))
        self._text = table[_TEXT:_RECORDS].view(np.uint8)

    # Written by the rank.

    def register(self) -> None:
        """Say who this process is: others may watch and, at the end, kill it."""
        self.beat()
        self.words[1] = process_start(os.getpid())
        self.state = State.STARTING
        self.words[0] = os.getpid()

    def beat(self) -> None:
        """A sign of life."""
        self.words[2] = time.monotonic_ns()
        self.words[3] = time.process_time_ns()

    def note_received(self, step_id: int, checksum: int) -> None:
        """Echo the plan of ``step_id``, of which ``checksum`` has up to 64 bits."""
        self.words[_ECHO + step_id % NUM_ECHOES] = echo_word(step_id, checksum)
        self.words[12] = step_id

    def note_inputs(self, step_id: int, digest: int) -> None:
        """Echo the digest of the step's inputs."""
        self.words[_INPUTS + step_id % NUM_ECHOES] = echo_word(step_id, digest)

    def note_memory(self, lines: Mapping[str, int]) -> None:
        """Show where this rank's memory goes: bytes of each of ``MEMORY_LINES``, and of others in one sum."""
        words = [lines[name] for name in MEMORY_LINES]
        words.append(sum(size for name, size in lines.items() if name not in MEMORY_LINES))
        for index, word in enumerate(words):
            self.words[_MEMORY + index] = word

    def note_startup(self, seconds: Mapping[str, float]) -> None:
        """Show how long this rank's start took: seconds of the ``STARTUP_PHASES`` that it had, of others in one sum."""
        words = [max(1, round(seconds[name] * 1e6)) if name in seconds else 0 for name in STARTUP_PHASES]
        others = [taken_s for name, taken_s in seconds.items() if name not in STARTUP_PHASES]
        words.append(max(1, round(sum(others) * 1e6)) if others else 0)
        for index, word in enumerate(words):
            self.words[_STARTUP + index] = word

    def begin_step(self, step_id: int) -> None:
        """The step begins here."""
        self.words[13] = time.monotonic_ns()
        self.words[10] = step_id

    def end_step(self, step_id: int) -> None:
        """The step is over here; this rank is idle if it has begun no other."""
        self.words[11] = step_id
        if self.words[10] == step_id:
            self.words[13] = 0

    def fail(self, text: str, *, blamed_rank: int | None = None) -> None:
        """Leave the last words, of which the end is kept; the first to do so is heard.

        ``blamed_rank``: the rank whose failure caused this one, if it is not this rank's own.
        """
        if self.state == State.FAILED:
            return
        raw = np.frombuffer(text.encode(errors="replace")[-_TEXT_BYTES:], np.uint8)
        self._text[: len(raw)] = raw
        self.words[6] = len(raw)
        self.words[5] = 0 if blamed_rank is None else blamed_rank + 1
        self.words[4] = time.monotonic_ns()
        self.state = State.FAILED

    def note_exit(self, code: int) -> None:
        """Written by the parent: how the process ended, negative for a signal."""
        self.words[14] = code + _EXIT_BIAS

    # Read by anybody.

    @property
    def pid(self) -> int:
        """The process; 0 before it has registered."""
        return self.words[0]

    @property
    def started_ticks(self) -> int:
        """When the process started, to tell it from a later one with the same pid."""
        return self.words[1]

    @property
    def heartbeat_ns(self) -> int:
        """The last sign of life."""
        return self.words[2]

    @property
    def cpu_ns(self) -> int:
        """CPU time of the process at that moment."""
        return self.words[3]

    @property
    def state(self) -> State:
        """Where the process is in its life."""
        return State(self.words[8])

    @state.setter
    def state(self, state: State) -> None:
        self.words[8] = state

    @property
    def phase(self) -> RankPhase:
        """The phase that the rank reached last."""
        return split_phase(self.words[PHASE_WORD])[0]

    @property
    def count(self) -> int:
        """How many collectives of this step it has entered; 1 where it has done its part of a start-up phase."""
        return split_phase(self.words[PHASE_WORD])[1]

    @property
    def step_started(self) -> int:
        """The last step that it began; 0 before the first."""
        return self.words[10]

    @property
    def step_done(self) -> int:
        """The last step that it ended."""
        return self.words[11]

    @property
    def step_received(self) -> int:
        """The last plan that it has."""
        return self.words[12]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each of ``MEMORY_LINES``, then of ``OTHER`` if there are any; empty before they are known."""
        *words, other = self.words[_MEMORY:_STARTUP].tolist()
        lines = dict(zip(MEMORY_LINES, words, strict=True)) if any(words) or other else {}
        return lines | {OTHER: other} if other else lines

    @property
    def startup_s(self) -> dict[str, float]:
        """Seconds of the phases of its start, in order, ``OTHER`` last; empty before it is ready."""
        words = self.words[_STARTUP:_TEXT].tolist()
        names = (*STARTUP_PHASES, OTHER)
        return {name: taken_us * 1e-6 for name, taken_us in zip(names, words, strict=True) if taken_us}

    @property
    def collective_ns(self) -> int:
        """Time that it has spent in collectives of host tensors, waiting for the other ranks included."""
        return self.words[COLLECTIVE_WORD]

    @property
    def busy_since_ns(self) -> int:
        """When its current step began; 0 while it waits for a plan."""
        return self.words[13]

    @property
    def failed_ns(self) -> int:
        """When it failed; 0 if it has not."""
        return self.words[4]

    @property
    def blamed_rank(self) -> int | None:
        """The rank that it holds responsible for its failure, if that is another one."""
        return self.words[5] - 1 if self.words[5] > 0 else None

    @property
    def failure_text(self) -> str:
        """Its last words, usually a traceback."""
        return self._text[: min(self.words[6], _TEXT_BYTES)].tobytes().decode(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """How its process ended (negative: by a signal), if it is its parent's to know."""
        return self.words[14] - _EXIT_BIAS if self.words[14] else None


class JobBoard:
    """The board, seen by one process; ``create`` makes it on rank 0, ``open`` maps it elsewhere.

    ``echoes`` and ``inputs``: (world size, 16) int64, see ``echo_word``.
    """

    def __init__(self, memory: mmap.mmap, world_size: int, segment: Segment | None = None) -> None:
        self.world_size = world_size
        self._segment = segment
        words = memoryview(memory).cast("q")
        table = np.frombuffer(memory, np.int64)
        self.created_wall_ns, self.created_ns = words[2], words[3]
        starts = [_HEADER_WORDS + rank * _SLOT_WORDS for rank in range(world_size)]
        self.slots = tuple(
            RankSlot(rank, words[start : start + _SLOT_WORDS], table[start : start + _SLOT_WORDS])
            for rank, start in enumerate(starts)
        )
        body = table[_HEADER_WORDS : _HEADER_WORDS + world_size * _SLOT_WORDS].reshape(world_size, _SLOT_WORDS)
        self.echoes = body[:, _ECHO : _ECHO + NUM_ECHOES]
        self.inputs = body[:, _INPUTS : _INPUTS + NUM_ECHOES]

    @classmethod
    def create(cls, world_size: int) -> JobBoard:
        """A new board; ``RuntimeError`` where /dev/shm is too small."""
        segment = create_segment(8 * (_HEADER_WORDS + world_size * _SLOT_WORDS))
        header = memoryview(segment.memory).cast("q")
        header[1], header[2], header[3] = world_size, time.time_ns(), time.monotonic_ns()
        header[0] = _MAGIC
        return cls(segment.memory, world_size, segment)

    @classmethod
    def open(cls, address: str) -> JobBoard:
        """The board at ``address``; ``RankError`` (rank 0) if rank 0 has ended or shares it no more."""
        try:
            memory = open_segment(address)
        except FileNotFoundError as error:
            raise RankError(0, f"it has ended in import or group_init: its board {address} is gone") from error
        header = memoryview(memory).cast("q")
        assert header[0] == _MAGIC, f"{address} is not a board: its magic is {header[0]:#x}, not {_MAGIC:#x}"
        return cls(memory, header[1])

    @property
    def address(self) -> str:
        """Where others find it; on rank 0 only."""
        assert self._segment is not None, "only rank 0 shares the board"
        return self._segment.address

    def stop_sharing(self) -> None:
        """All ranks have it; nobody else can map it from now on.  The memory goes with the last process."""
        if self._segment is not None:
            self._segment.stop_sharing()


def echo_word(step_id: int, checksum: int) -> int:
    """``step id << 32 | low half of the checksum`` as a signed word."""
    word = (step_id & _HALF) << 32 | (checksum & _HALF)
    return word - (1 << 64) if word >> 63 else word


def split_echo(word: int) -> tuple[int, int]:
    """Low halves of the step id and of the checksum in an ``echo_word``."""
    return word >> 32 & _HALF, word & _HALF


def process_start(pid: int) -> int:
    """When ``pid`` started, in clock ticks since boot; ``ProcessLookupError`` if there is none."""
    return int(_stat(pid)[19])


def process_vitals(pid: int) -> tuple[str, int]:
    """The kernel's letter for its state (``T``: stopped, ``Z``: ended), and the CPU time it has used, in clock ticks.

    ``("X", 0)`` if there is none.
    """
    try:
        fields = _stat(pid)
    except ProcessLookupError:
        return "X", 0
    return fields[0], int(fields[11]) + int(fields[12])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None
    return stat.rpartition(")")[2].split()
