"""One rank's slot of the job's board: where the rank is, which steps it has run, and why it failed.

::

    a slot, in words of 8 bytes                                                            written by
      0 pid                      8 state                                                    the rank itself
      1 process start, ticks     9 count << 8 | phase (see ``progress``)                     the rank itself
      2 heartbeat, ns           10 step started          12 step received                   the rank itself
      3 process CPU time, ns    11 step done             13 busy since, ns (0: idle)        the rank itself
      4 failed at, ns            5 failed rank + 1        6 bytes of failure text           the rank itself
     15 time in collectives, ns (host tensors; 0 if a device does them)                     the rank itself
     14 exit code + 1000                                                                    its parent, rank 0
     16..31 echo of step s at s mod 16: step id << 32 | low half of the plan's checksum     the rank itself
     32..47 the same with the digest of the step's inputs (only with ``debug_compare_rank_inputs``)      the rank itself
     48..   the memory ledger, bytes: ``MEMORY_LINES``, then the sum of all other lines      the rank itself
      then  the phases of the start, us: ``STARTUP_PHASES``, then the sum of all others      the rank itself
      then  the channels of ``tier_progress``, one after the other                           the rank itself
      then  the rank's host and what that host knows of its process: ``HostView``            the host's first rank
      then  where it computes, 128 bytes of text; empty on a CPU                             the rank itself
      then  failure text, 8 KiB; then 512 records of 9 words: step s at s mod 512            the rank itself

The ledger is all 0 until it is known; a phase that a rank does not have is 0.

There is no lock.  Each word has one writing process and is an aligned 8-byte store and load (``memoryview`` and numpy
copy an item of that size at once), which x86-64 and ARM never tear.  Nothing here orders two words, and no reader
depends on an order: an echo carries its step id in the same word; a record that is being written shows people a mixture
for a moment; the failure text counts once its length is set, and is read again when the process has ended, which the
kernel orders.  A reader that would end the job because of a word looks twice, some time apart, because a store becomes
visible only after a while.

Times are CLOCK_MONOTONIC, which all processes of a host share.  ``board_mirror.py`` copies slots between hosts.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_engine.job.progress import RankPhase, split_phase
from tp_engine.job.tier_progress import CHANNEL_WORDS, TIER_CHANNELS, TierProgress
from tp_engine.plan import StepPlan

NUM_RECORDS: Final = 512
RECORD_FIELDS = (
    "step_id", "plan_bytes", "decode_rows", "prefill_tokens",
    "received_ns", "started_ns", "launched_ns", "done_ns", "plan_checksum",
)  # fmt: skip
MEMORY_LINES = (
    "total", "requested", "weights", "activations", "non_torch", "tables", "cuda_graphs", "states", "adapters",
    "images", "kv_cache_available", "kv_cache", "kv_host",
)  # fmt: skip
STARTUP_PHASES = (
    "opening the device", "first snapshot", "sharing memory", "sharing memory between GPUs", "loading weights",
    "packing weights", "warming up", "measuring CUDA graphs", "profiling memory", "allocating the KV cache",
    "recording steps",
)  # fmt: skip
OTHER: Final = "other"  # the sum of the memory lines, or of the phases, without a word of their own
_HOST_NAME: Final = 5
HOST_WORDS: Final = _HOST_NAME + 8
DEVICE_WORDS: Final = 16
NUM_ECHOES: Final = 16
PHASE_WORD: Final = 9
COLLECTIVE_WORD: Final = 15

_TEXT_BYTES = 8192
_ECHO = 16
_INPUTS = _ECHO + NUM_ECHOES
_MEMORY = _INPUTS + NUM_ECHOES
_STARTUP = _MEMORY + len(MEMORY_LINES) + 1
_TIERS = _STARTUP + len(STARTUP_PHASES) + 1
_HOST = _TIERS + len(TIER_CHANNELS) * CHANNEL_WORDS
_DEVICE = _HOST + HOST_WORDS
_TEXT = _DEVICE + DEVICE_WORDS
HEAD_WORDS: Final = _TEXT
_RECORDS = _TEXT + _TEXT_BYTES // 8
SLOT_WORDS = _RECORDS + NUM_RECORDS * len(RECORD_FIELDS)
_EXIT_BIAS = 1000
_HALF = 0xFFFFFFFF

_RECORD = struct.Struct("8qQ")
_WIDTH: Final = len(RECORD_FIELDS)
_STARTED, _LAUNCHED, _DONE = (RECORD_FIELDS.index(name) for name in ("started_ns", "launched_ns", "done_ns"))

assert _RECORD.size == 8 * _WIDTH


class State(IntEnum):
    """The state of a rank's process; ``FAILED`` and ``LEFT`` are final.

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


class Ended(IntEnum):
    """How the end of a rank's process became known."""

    NOT = 0
    PROCESS = 1
    CLOSED = 2
    LOST = 3


class _Word:
    """A word as it is."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, owner: RankSlot | HostView, _type: type) -> int:
        return owner.words[self._index]


class HostView:
    """What a rank's host knows of the rank's process, in words (13,) int64 of its slot, as other hosts cannot look::

        0   ended at, ns; 0 while it is not known to have ended     1   how: ``Ended``
        2   the kernel's letter for its state (0: not known)        3   CPU time it has used, in clock ticks
        4   resident bytes                                          5.. the host's name, 64 bytes

    The first rank of the host writes words 0 to 4 on its own board; the connection between the hosts carries them to
    the others, where ``Ended`` may also say that the connection itself has ended.  With one host only the name is
    written.
    """

    ended_ns = _Word(0)
    resident_bytes = _Word(4)

    def __init__(self, words: memoryview[int]) -> None:
        self.words, self._name = words, words[_HOST_NAME:].cast("B")

    def note_name(self) -> None:
        """Called by the rank: the name of its host."""
        raw = socket.gethostname().encode(errors="replace")[: len(self._name)]
        self._name[: len(raw)] = raw

    def note_ended(self, how: Ended, now_ns: int) -> None:
        """Enter that the process has ended, or cannot be reached any more; later calls do nothing."""
        if not self.ended_ns:
            self.words[1] = how
            self.words[0] = now_ns

    def note_vitals(self, state: str, ticks: int, resident_bytes: int) -> None:
        """Note what the kernel says about the process."""
        self.words[2], self.words[3], self.words[4] = ord(state), ticks, resident_bytes

    @property
    def ended(self) -> Ended:
        """How the process ended, as far as known."""
        return Ended(self.words[1]) if self.ended_ns else Ended.NOT

    @property
    def vitals(self) -> tuple[str, int]:
        """The process's state and CPU time, from ``process_vitals``; ``("X", 0)`` while nothing is known."""
        return chr(self.words[2] or ord("X")), self.words[3]

    @property
    def name(self) -> str:
        """The host's name; empty before the rank has registered."""
        return bytes(self._name).rstrip(b"\0").decode(errors="replace")


class RankSlot:
    """One rank's slot.  The rank itself writes, all processes read; ``words`` is the slot as 8-byte integers.
    ``echoes`` and ``inputs``: 16 words each, see ``echo_word``.  ``channels``: those of ``tier_progress``, by name.
    ``head``: the words before the failure text."""

    TIME_WORDS: Final = (2, 4, 13)
    ENDED_WORD: Final = _HOST

    pid = _Word(0)  # of the process; 0 before it has registered
    started_ticks = _Word(1)  # when the process started, which tells it from a later process with the same pid
    heartbeat_ns = _Word(2)  # the last sign of life
    cpu_ns = _Word(3)  # CPU time of the process at its last sign of life
    starved_ns = _Word(7)  # how long its main thread was able to run, and had no core, until then
    failed_ns = _Word(4)  # when it failed; 0 if it has not
    step_started = _Word(10)  # the last step that it began; 0 before the first
    step_done = _Word(11)  # the last step that it ended
    step_received = _Word(12)  # the last step whose plan it has received
    busy_since_ns = _Word(13)  # when its current step began; 0 while it waits for a plan
    collective_ns = _Word(COLLECTIVE_WORD)  # time in collectives of host tensors, with the wait for the other ranks

    def __init__(self, rank: int, words: memoryview[int], table: npt.NDArray[np.int64]) -> None:
        self.rank, self.words = rank, words
        self.echoes = words[_ECHO : _ECHO + NUM_ECHOES]
        self.inputs = words[_INPUTS : _INPUTS + NUM_ECHOES]
        self.channels = {
            name: words[start : start + CHANNEL_WORDS]
            for name, start in zip(TIER_CHANNELS, range(_TIERS, _HOST, CHANNEL_WORDS), strict=True)
        }
        self.records = table[_RECORDS:].reshape(NUM_RECORDS, len(RECORD_FIELDS))
        self.head = table[:HEAD_WORDS]
        self.host = HostView(words[_HOST:_DEVICE])
        self._device = words[_DEVICE:_TEXT].cast("B")
        self.text = table[_TEXT:_RECORDS].view(np.uint8)

    # Written by the rank.

    def register(self) -> None:
        """Show this process's id and start time, by which others watch it and may kill it."""
        self.beat()
        self.host.note_name()
        self.words[1] = process_start(os.getpid())
        self.state = State.STARTING
        self.words[0] = os.getpid()

    def beat(self) -> None:
        """Give a sign of life."""
        self.words[2] = time.monotonic_ns()
        self.words[3] = time.process_time_ns()
        self.words[7] = _starved_ns()

    def note_device(self, text: str) -> None:
        """Show which GPU the rank computes on, as an operator finds it."""
        raw = text.encode(errors="replace")[: len(self._device)]
        self._device[: len(raw)] = raw

    def tier_progress(self) -> dict[str, TierProgress]:
        """Return what writes the rank's channels, by name."""
        return {name: TierProgress(words) for name, words in self.channels.items()}

    def note_received(self, step_id: int, checksum: int) -> None:
        """Echo the plan of ``step_id``, of which ``checksum`` has up to 64 bits."""
        self.words[_ECHO + step_id % NUM_ECHOES] = echo_word(step_id, checksum)
        self.words[12] = step_id

    def note_inputs(self, step_id: int, digest: int) -> None:
        """Echo the digest of the step's inputs."""
        self.words[_INPUTS + step_id % NUM_ECHOES] = echo_word(step_id, digest)

    def note_memory(self, lines: Mapping[str, int]) -> None:
        """Show this rank's memory ledger: the bytes of each of ``MEMORY_LINES``, and the sum of all others."""
        others = sum(size for name, size in lines.items() if name not in MEMORY_LINES)
        for index, word in enumerate((*(lines[name] for name in MEMORY_LINES), others), start=_MEMORY):
            self.words[index] = word

    def note_startup(self, seconds: Mapping[str, float]) -> None:
        """Show how long this rank's start took: seconds of its ``STARTUP_PHASES``, and the sum of all others."""
        words = [max(1, round(seconds[name] * 1e6)) if name in seconds else 0 for name in STARTUP_PHASES]
        others = [taken_s for name, taken_s in seconds.items() if name not in STARTUP_PHASES]
        words.append(max(1, round(sum(others) * 1e6)) if others else 0)
        for index, word in enumerate(words, start=_STARTUP):
            self.words[index] = word

    def begin_step(self, step_id: int) -> None:
        """Enter that the step begins on this rank."""
        self.words[13] = time.monotonic_ns()
        self.words[10] = step_id

    def end_step(self, step_id: int) -> None:
        """Enter that the step has ended on this rank, which is idle if it has begun no other."""
        self.words[11] = step_id
        if self.words[10] == step_id:
            self.words[13] = 0

    def fail(self, text: str, *, failed_rank: int | None = None) -> None:
        """Record this rank's failure and the end of ``text``; later calls do nothing.  ``failed_rank``: another rank
        whose failure caused this one."""
        if self.state == State.FAILED:
            return
        raw = np.frombuffer(text.encode(errors="replace")[-_TEXT_BYTES:], np.uint8)
        self.text[: len(raw)] = raw
        self.words[6] = len(raw)
        self.words[5] = 0 if failed_rank is None else failed_rank + 1
        self.words[4] = time.monotonic_ns()
        self.state = State.FAILED

    def note_exit(self, code: int) -> None:
        """Called by the parent: how the process ended, negative for a signal."""
        self.words[14] = code + _EXIT_BIAS

    # Read by all processes.

    @property
    def state(self) -> State:
        """The state of the process."""
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
        """How many collectives of this step it has entered; in a start-up phase, 1 once its part is done."""
        return split_phase(self.words[PHASE_WORD])[1]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each of ``MEMORY_LINES``, then of ``OTHER`` if there are any; empty before they are known."""
        *words, other = self.words[_MEMORY:_STARTUP].tolist()
        lines = dict(zip(MEMORY_LINES, words, strict=True)) if any(words) or other else {}
        return lines | {OTHER: other} if other else lines

    @property
    def startup_s(self) -> dict[str, float]:
        """Seconds of the phases of its start, in order, ``OTHER`` last; empty before it is ready."""
        words = self.words[_STARTUP:_TIERS].tolist()
        names = (*STARTUP_PHASES, OTHER)
        return {name: taken_us * 1e-6 for name, taken_us in zip(names, words, strict=True) if taken_us}

    @property
    def device(self) -> str:
        """The GPU that the rank computes on; empty on a CPU, and before it is known."""
        return bytes(self._device).rstrip(b"\0").decode(errors="replace")

    @property
    def failed_rank(self) -> int | None:
        """Another rank that caused its failure, if any."""
        return self.words[5] - 1 if self.words[5] > 0 else None

    @property
    def failure_text(self) -> str:
        """Why it failed, usually a traceback."""
        return self.text[: min(self.words[6], _TEXT_BYTES)].tobytes().decode(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """How its process ended (negative: by a signal), if its parent has recorded that."""
        return self.words[14] - _EXIT_BIAS if self.words[14] else None


class StepRecorder:
    """Records a rank's steps on its slot, in about two microseconds per step.

    ::

        received           begin                 launched          done
        ----|----------------|---- model, sampling ---|-- results ---|---->
    """

    def __init__(self, slot: RankSlot) -> None:
        self._slot = slot
        self._words = slot.words[-NUM_RECORDS * _WIDTH :]  # the records are the slot's end
        self._bytes = self._words.cast("B")

    def received(self, plan: StepPlan, num_bytes: int, checksum: int) -> None:
        """Record that the plan has arrived (on rank 0: is sent), ``num_bytes`` long as encoded, with its 64-bit
        checksum."""
        num_prefilled = int(plan.prefill_tokens.sum()) if len(plan.prefill_tokens) else 0
        counts = (plan.step_id, num_bytes, len(plan.decode_rows), num_prefilled)
        offset = plan.step_id % NUM_RECORDS * _RECORD.size
        _RECORD.pack_into(self._bytes, offset, *counts, time.monotonic_ns(), 0, 0, 0, checksum)
        self._slot.note_received(plan.step_id, checksum)

    def begin(self, step_id: int) -> None:
        """Record that the step begins."""
        self._words[step_id % NUM_RECORDS * _WIDTH + _STARTED] = time.monotonic_ns()
        self._slot.begin_step(step_id)

    def launched(self, step_id: int) -> None:
        """Record that the model and the sampler have been called; on a CPU they have also run."""
        self._words[step_id % NUM_RECORDS * _WIDTH + _LAUNCHED] = time.monotonic_ns()

    def done(self, step_id: int) -> None:
        """Record that the step's results are on the host; ranks other than 0 get no results and have nothing left to
        do."""
        self._words[step_id % NUM_RECORDS * _WIDTH + _DONE] = time.monotonic_ns()
        self._slot.end_step(step_id)


def echo_word(step_id: int, checksum: int) -> int:
    """``step id << 32 | low half of the checksum`` as a signed word."""
    word = (step_id & _HALF) << 32 | (checksum & _HALF)
    return word - (1 << 64) if word >> 63 else word


def split_echo(word: int) -> tuple[int, int]:
    """Low halves of the step id and of the checksum in an ``echo_word``."""
    return word >> 32 & _HALF, word & _HALF


def process_start(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot; ``ProcessLookupError`` if there is no such process."""
    return int(_stat(pid)[19])


def process_vitals(pid: int) -> tuple[str, int]:
    """Return the kernel's letter for its state (``T``: stopped, ``Z``: ended), and the CPU time it has used, in clock
    ticks.  ``("X", 0)`` if there is no such process."""
    try:
        fields = _stat(pid)
    except ProcessLookupError:
        return "X", 0
    return fields[0], int(fields[11]) + int(fields[12])


def _starved_ns() -> int:
    """How long this process's main thread has waited for a core; 0 where the kernel does not count that."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def resident_bytes(pid: int) -> int:
    """Return the process's resident memory; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, which is the state."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None
    return stat.rpartition(")")[2].split()
