"""Shared memory in which the ranks of one host exchange tensors: slots that one rank writes and the others read.

::

    offset                                                                                 (N ranks, sizes in bytes)
    0          | magic u64 | num_ranks u32 | slot_bytes u32 | pad to 64 |
    64         | 0 to 0 | 0 to 1 | ... | 1 to 0 | ... | N-1 to N-1 |   N x N semaphores of 64: poster to waiter
    64 + 64 NN, | rank 0, even | rank 0, odd | rank 1, even | ... |    2 N slots of slot_bytes
    to 4096    | results |                                             one more

Rank r's part of piece ``k`` (0, 1, 2, ... over all collectives; counted privately) lies in its slot ``k mod 2``.

* One-shot: write the own slot;  post to all others;  wait for all others;  read all slots.
* Two-shot: the same, but read only the own share of all slots and write its sum to the same place of ``results``;
  post;  wait;  read all of ``results``.

This is correct on x86-64 and on ARM.  A rank posts for piece ``k`` after it has finished piece ``k - 1``.

*No early reading.*  A slot, and a share of ``results``, is written before its writer's post and read after the wait
that this post satisfied; the n-th wait takes the n-th post, because all ranks cut the same tensors into the same
pieces.
*No overwriting.*  A rank that writes its slot for piece ``k`` has waited for the posts of all others for piece
``k - 1``, so they have finished piece ``k - 2``, the last one in this slot.  A rank that writes to ``results`` for
piece ``k`` has waited for the first posts of all others for ``k``, so they have finished ``k - 1``.
*Visibility.*  POSIX makes all that precedes a post visible after the wait that the post satisfies.
"""

from __future__ import annotations

import ctypes
import mmap
import struct

from tp_engine.ipc.segment import Segment, create_segment, open_segment
from tp_engine.ipc.semaphore import SEMAPHORE_BYTES, Semaphore

_MAGIC = 0x31746F6C73707474  # "ttpslot1"
_HEADER = struct.Struct("<QII")
SEMAPHORES_OFFSET = 64
_PAGE = 4096


class TensorSlots(Segment):
    """The memory, mapped by this process; one rank calls ``create``, the others ``attach``."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        super().__init__(memory, descriptor)
        magic, num_ranks, slot_bytes = _HEADER.unpack_from(memory)
        if magic != _MAGIC:
            raise RuntimeError("the shared memory of the ranks' collectives holds something else")
        self.num_ranks, self.slot_bytes = int(num_ranks), int(slot_bytes)

    @classmethod
    def create(cls, num_ranks: int, slot_bytes: int) -> TensorSlots:
        """New memory; ``slot_bytes`` is a multiple of 64.  ``RuntimeError`` if /dev/shm is too small."""
        assert num_ranks >= 2 and slot_bytes > 0 and slot_bytes % 64 == 0, f"{num_ranks} ranks, {slot_bytes} bytes"
        memory, descriptor = create_segment(
            _slots_offset(num_ranks) + (2 * num_ranks + 1) * slot_bytes, num_ranks=num_ranks
        )
        _HEADER.pack_into(memory, 0, _MAGIC, num_ranks, slot_bytes)
        slots = cls(memory, descriptor)
        for sender in range(num_ranks):
            for receiver in range(num_ranks):
                slots.semaphore(sender, receiver).initialise(0)
        return slots

    @classmethod
    def attach(cls, address: str) -> TensorSlots:
        """Return the memory that another rank created; ``FileNotFoundError`` if that rank has ended or stopped sharing
        it."""
        return cls(open_segment(address))

    @property
    def base(self) -> int:
        """The address of the memory in this process, valid as long as ``memory`` lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def slots_offset(self) -> int:
        """The offset of rank 0's even slot."""
        return _slots_offset(self.num_ranks)

    @property
    def results_offset(self) -> int:
        """The offset of the results, which are as large as a slot."""
        return self.slots_offset + 2 * self.num_ranks * self.slot_bytes

    def semaphore(self, sender: int, receiver: int) -> Semaphore:
        """Return the semaphore that ``sender`` posts and ``receiver`` waits for."""
        index = sender * self.num_ranks + receiver
        return Semaphore(self.memory, SEMAPHORES_OFFSET + index * SEMAPHORE_BYTES)


def _slots_offset(num_ranks: int) -> int:
    end = SEMAPHORES_OFFSET + num_ranks * num_ranks * SEMAPHORE_BYTES
    return -(-end // _PAGE) * _PAGE
