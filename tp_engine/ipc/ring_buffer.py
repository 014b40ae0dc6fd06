"""A bounded ring in one shared-memory segment: one writer, N readers, every reader gets every message.

::

    offset                                                              (N readers, K slots, all sizes in bytes)
    0             | magic u64 | num_readers u32 | num_slots u32 | slot_bytes u32 | pad to 64 |
    64            | attached[0] | free[0] | filled[0] | attached[1] | ... | filled[N-1] |    3 N semaphores of 64
    64 + 192 N    | slot 0 | slot 1 | ... | slot K-1 |                                       K slots of slot_bytes
                  each slot: | payload length u32 | 0 last of a message, 1 it goes on, 2 a call u32 | payload |

A message is cut into pieces of at most ``slot_bytes - 8``; piece ``s`` (0, 1, 2, ...) lies in slot ``s mod K``, so a
message may be larger than the whole ring.  Both sides count ``s`` privately; it is never shared.

A *call* is a piece without payload that belongs to no message: it says that one is about to come.  Waking a blocked
process on another core takes longer than making a small plan.  So the writer calls before it makes one: readers wake up
meanwhile, spin for a moment (``CallSpin``), and take the message when it has arrived.

This is correct on x86-64 and on ARM.  ``free[i]`` starts at K, ``filled[i]`` at 0.

* Writer, for piece ``s``:  wait ``free[i]`` for every i;  write slot ``s mod K``;  post ``filled[i]`` for every i.
* Reader i, for piece ``s``:  wait ``filled[i]``;  copy slot ``s mod K``;  post ``free[i]``.

After each piece the writer takes ``free[i]`` for the next piece from all readers that already have room, so it need not
do that later, while readers wait.

*No overwriting.*  After its wait for piece ``s`` the writer has taken ``s + 1`` from ``free[i]``; K were there at the
start, so reader i has posted at least ``s + 1 - K`` times: it has copied piece ``s - K``, the last one in this slot.
*No early reading.*  After its wait for piece ``s`` reader i has taken ``s + 1`` from ``filled[i]``, which started at 0:
the writer has finished piece ``s``, and by the first point it does not touch that slot again before reader i posts.
*Visibility.*  Each "has" above is a post seen by a wait, and POSIX makes whatever precedes a post visible after the
wait that it satisfies.  No plain load or store orders anything here, so no memory model matters but the semaphore's.
"""

import mmap
import struct
import time
from collections.abc import Callable
from typing import TypeAlias

from tp_engine.errors import RankError, again
from tp_engine.ipc.segment import Segment, create_segment, open_segment
from tp_engine.ipc.semaphore import SEMAPHORE_BYTES, Semaphore, default_spin_s

Alive: TypeAlias = Callable[[int], bool]
"""``alive(rank)``: False once that rank's process has ended."""

WriterAlive: TypeAlias = Callable[[], bool]
"""False once rank 0's process has ended."""

_Bytes: TypeAlias = bytes | bytearray | memoryview

_MAGIC = 0x31676E6972707474  # "ttpring1"
_HEADER = struct.Struct("<QIII")
_SLOT_HEADER = struct.Struct("<II")
_FIRST_SEMAPHORE = 64
_ALIVE_CHECK_S = 0.5
_ATTACH_POLL_S = 0.002
_LONGEST_BLOCK_S = 86400.0
_LAST, _GOES_ON, _CALL = 0, 1, 2
_SPIN_S = 300e-6
_IDLE_S = 5e-3  # a message that comes later was not the one that the call was for
_FEWEST_SKIPPED, _MOST_SKIPPED = 16, 4096


class _Reader:
    """One reader's three semaphores."""

    __slots__ = ("attached", "filled", "free", "rank")

    def __init__(self, memory: mmap.mmap, index: int, first_rank: int) -> None:
        offset = _FIRST_SEMAPHORE + 3 * SEMAPHORE_BYTES * index
        self.rank = first_rank + index
        self.attached = Semaphore(memory, offset)
        self.free = Semaphore(memory, offset + SEMAPHORE_BYTES)
        self.filled = Semaphore(memory, offset + 2 * SEMAPHORE_BYTES)


def _slots_offset(num_readers: int) -> int:
    return _FIRST_SEMAPHORE + 3 * SEMAPHORE_BYTES * num_readers


def _wait_for(
    rank: int, semaphore: Semaphore, what: str, *, timeout_s: float, spin_s: float, alive: Alive | None
) -> None:
    """Take one from ``semaphore``, which ``rank`` posts; ``RankError`` at the deadline or when ``rank`` has ended."""
    deadline = time.monotonic() + timeout_s
    remaining = timeout_s
    longest_s = _LONGEST_BLOCK_S if alive is None else _ALIVE_CHECK_S
    while not semaphore.wait(min(remaining, longest_s), spin_s):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise RankError(rank, f"{what} within {timeout_s:g} s")
        if alive is not None and not alive(rank):
            raise RankError(rank, f"{what}: its process is gone")


class RingWriter:
    """The writer's end.  Creates the segment, whose address is ``name``; readers 0..N-1 are ranks ``first_rank`` on.
    ``spin_s``: how long a wait spins before it blocks (None: ``default_spin_s``).  A wait calls ``alive`` every half
    second.  ``RuntimeError`` if /dev/shm is too small."""

    def __init__(
        self,
        num_readers: int,
        *,
        first_rank: int = 1,
        num_slots: int = 64,
        slot_bytes: int = 65536,
        spin_s: float | None = None,
        alive: Alive | None = None,
    ) -> None:
        assert num_readers >= 1, "a ring needs a reader"
        assert num_slots >= 1, "a ring needs a slot"
        assert slot_bytes > _SLOT_HEADER.size, f"a slot of {slot_bytes} bytes has no room for a payload"
        self._first_slot = _slots_offset(num_readers)
        self._num_slots, self._slot_bytes = num_slots, slot_bytes
        self._room = slot_bytes - _SLOT_HEADER.size
        self.num_bytes = num_slots * slot_bytes
        self._spin_s = default_spin_s(num_readers + 1) if spin_s is None else spin_s
        self._alive = alive
        self._num_pieces = 0
        self._failure: BaseException | None = None
        self._segment = Segment(*create_segment(self._first_slot + num_slots * slot_bytes, num_ranks=num_readers + 1))
        self.name, self._memory = self._segment.address, self._segment.memory
        self._readers = [_Reader(self._memory, index, first_rank) for index in range(num_readers)]
        self._missing = list(self._readers)
        self._awaited = list(self._readers)  # readers whose ``free`` is not yet taken for the next piece
        for reader in self._readers:
            reader.attached.initialise(0)
            reader.free.initialise(num_slots)
            reader.filled.initialise(0)
        _HEADER.pack_into(self._memory, 0, _MAGIC, num_readers, num_slots, slot_bytes)

    def wait_attached(self, timeout_s: float) -> None:
        """Wait for all readers, then stop sharing the segment, so no other process can attach.  ``RankError`` at the
        deadline names the first reader that is missing and lists the others."""
        deadline = time.monotonic() + timeout_s
        while self._missing:
            self._missing = [reader for reader in self._missing if not reader.attached.try_wait()]
            ranks = [reader.rank for reader in self._missing]
            what = f"(missing ranks: {ranks})"
            for rank in ranks:
                if self._alive is not None and not self._alive(rank):
                    raise RankError(rank, f"did not attach to shared memory: its process is gone {what}")
            if ranks and time.monotonic() >= deadline:
                raise RankError(ranks[0], f"did not attach to shared memory within {timeout_s:g} s {what}")
            time.sleep(_ATTACH_POLL_S if ranks else 0.0)
        self._segment.stop_sharing()

    def write(self, message: bytes | bytearray | memoryview, timeout_s: float) -> None:
        """Copy ``message`` to all readers; ``timeout_s`` bounds each wait for room.  ``RankError`` names a reader that
        makes no room.  Some readers may then have a part of the message, so every later write raises the same error.
        After a write that a signal handler interrupted, later writes raise ``RuntimeError`` for the same reason."""
        if isinstance(self._failure, RankError):
            raise again(self._failure)
        if self._failure is not None:
            raise RuntimeError("an earlier step plan was interrupted: ranks may have a part of it") from self._failure
        try:
            while len(message) > self._room:
                message = memoryview(message)
                self._write_piece(message[: self._room], _GOES_ON, timeout_s)
                message = message[self._room :]
            self._write_piece(message, _LAST, timeout_s)
        except BaseException as failure:
            self._failure = failure
            raise

    def call(self) -> None:
        """Wake the blocked readers, which then spin for a moment for the message that follows at once.  Does nothing if
        the ring is full, after a failure, or if ranks share cores, because a spin could then take the writer's core."""
        if self._failure is not None or self._spin_s == 0.0:
            return
        try:
            self._take_room()
            if not self._awaited:
                self._fill_slot(b"", _CALL)
        except BaseException as failure:
            self._failure = failure
            raise

    def _write_piece(self, piece: _Bytes, kind: int, timeout_s: float) -> None:
        for reader in self._awaited:
            what = "did not make room in its ring for a step plan"
            _wait_for(reader.rank, reader.free, what, timeout_s=timeout_s, spin_s=self._spin_s, alive=self._alive)
        self._fill_slot(piece, kind)

    def _take_room(self) -> None:
        """Take room for the next piece from the readers that have some now."""
        self._awaited = [reader for reader in self._awaited if not reader.free.try_wait()]

    def _fill_slot(self, piece: _Bytes, kind: int) -> None:
        """Put the next piece into its slot, for which all readers have room, and post to them."""
        offset = self._first_slot + self._num_pieces % self._num_slots * self._slot_bytes
        _SLOT_HEADER.pack_into(self._memory, offset, len(piece), kind)
        payload = offset + _SLOT_HEADER.size
        self._memory[payload : payload + len(piece)] = piece
        self._num_pieces += 1
        for reader in self._readers:
            reader.filled.post()
        self._awaited = self._readers
        self._take_room()

    def close(self) -> None:
        """Stop sharing and unmap; safe to call twice, but not while another thread is in a call of this ring."""
        self._segment.stop_sharing()
        self._readers.clear()
        self._memory.close()


class RingReader:
    """One reader's end: maps the segment ``name`` as reader ``index`` and says so.  ``alive()`` is asked every half
    second of a wait, so that the reader leaves when the writer's process is gone.  ``RankError`` (rank 0) if the
    segment does not exist."""

    def __init__(self, name: str, index: int, *, spin_s: float | None = None, alive: WriterAlive | None = None) -> None:
        try:
            self._memory = open_segment(name)
        except FileNotFoundError as error:
            raise RankError(0, f"its shared memory {name} is gone, so it has stopped or failed") from error
        magic, num_readers, self._num_slots, self._slot_bytes = _HEADER.unpack_from(self._memory, 0)
        assert magic == _MAGIC, f"{name} is not a ring: its magic is {magic:#x}, not {_MAGIC:#x}"
        assert 0 <= index < num_readers, f"reader {index} of a ring for {num_readers}"
        self._first_slot = _slots_offset(num_readers)
        self._spin_s = default_spin_s(num_readers + 1) if spin_s is None else spin_s
        self._alive: Alive | None = None if alive is None else lambda _rank: alive()
        self._num_pieces = 0
        self._message = bytearray()
        self._call_spin = CallSpin()
        self._view = memoryview(self._memory)
        self.has_alive = alive is not None
        self._self = _Reader(self._memory, index, first_rank=0)
        self._self.attached.post()

    def read(self, timeout_s: float) -> bytearray:
        """Return the next message, the caller's own copy; ``timeout_s`` bounds the wait for each of its pieces (if
        infinite, ``alive`` ends the wait).  ``RankError`` (rank 0) at the deadline or when the writer has ended; a
        later read continues from there."""
        has_piece, spin_s = self._self.filled.try_wait, self._spin_s
        if not has_piece():
            self._wait_piece(timeout_s, spin_s)
        while (kind := self._take_piece()) != _LAST:
            if has_piece():
                continue
            if kind == _CALL:
                spin_s = self._call_spin.begin()
            self._wait_piece(timeout_s, spin_s)
        self._call_spin.end()
        message, self._message = self._message, bytearray()
        return message

    def _wait_piece(self, timeout_s: float, spin_s: float) -> None:
        what = "sent no step plan"
        _wait_for(0, self._self.filled, what, timeout_s=timeout_s, spin_s=spin_s, alive=self._alive)

    def _take_piece(self) -> int:
        """Append the next piece, whose ``filled`` is taken, to the message; returns its kind."""
        offset = self._first_slot + self._num_pieces % self._num_slots * self._slot_bytes
        length, kind = _SLOT_HEADER.unpack_from(self._memory, offset)
        if length:
            payload = offset + _SLOT_HEADER.size
            self._message += self._view[payload : payload + length]
        self._num_pieces += 1
        self._self.free.post()
        return int(kind)

    def close(self) -> None:
        """Unmap; safe to call twice, but not while another thread is in ``read``."""
        self._view.release()
        self._memory.close()


class CallSpin:
    """How long a reader that was called spins for the message that is about to come: not at all while spins fail.

    A spin fails if the message comes after its end.  After that the next 16 calls get none; after each further failure
    twice as many.  Spins fail where making a plan takes long, and on a hypervisor that runs two virtual cores on one:
    the spinning reader takes the time that the writer needs for the message.
    """

    def __init__(self) -> None:
        self._num_left = 0
        self._num_skipped = _FEWEST_SKIPPED
        self._until_s = 0.0

    def begin(self) -> float:
        """After a call: seconds to spin."""
        if self._num_left:
            self._num_left -= 1
            return 0.0
        self._until_s = time.monotonic() + _SPIN_S
        return _SPIN_S

    def end(self) -> None:
        """Stop waiting: the message has arrived."""
        if self._until_s == 0.0:
            return
        late_s = time.monotonic() - self._until_s
        self._until_s = 0.0
        if late_s <= 0.0:
            self._num_skipped = _FEWEST_SKIPPED
        elif late_s < _IDLE_S:
            self._num_left = self._num_skipped
            self._num_skipped = min(2 * self._num_skipped, _MOST_SKIPPED)
