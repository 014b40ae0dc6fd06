"""Slots of a board for the boards of other hosts, as values that msgpack carries.

::

    a slot        (rank, head, text, records)
    head          the slot's words before the failure text
    text          the failure text, once the rank has failed; else empty
    records       of the steps that this slot has begun or ended since it was packed last; at most 512

Times are of the sender's clock.  The receiver subtracts how far that clock is ahead of its own, so that all times on a
board can be compared.  The head's state is written last: a reader that sees *failed* sees the text too.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import NUM_RECORDS, RECORD_FIELDS, RankSlot, State

Int64s: TypeAlias = npt.NDArray[np.int64]
PackedSlot: TypeAlias = tuple[int, bytes, bytes, bytes]
Mirrored: TypeAlias = Callable[[RankSlot, Int64s], None]
"""Called with a slot that has just been written, and the records (steps, fields) of steps that have ended."""

_STATE: Final = 8
_TEXT_BYTES: Final = 6
_STEP: Final = RECORD_FIELDS.index("step_id")
_DONE: Final = RECORD_FIELDS.index("done_ns")
_TIMES_OF_RECORD: Final = [index for index, name in enumerate(RECORD_FIELDS) if name.endswith("_ns")]


class SlotPacker:
    """Packs slots for one receiver; remembers which steps it has sent."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}

    def pack(self, slots: Sequence[RankSlot], *, with_records: bool) -> list[PackedSlot]:
        packed = []
        for slot in slots:
            head = slot.head.copy()
            text = slot.text[: head[_TEXT_BYTES]].tobytes() if head[_STATE] == State.FAILED else b""
            packed.append((slot.rank, head.tobytes(), text, self._new_records(slot) if with_records else b""))
        return packed

    def _new_records(self, slot: RankSlot) -> bytes:
        done, last = slot.step_done, max(slot.step_started, slot.step_received)
        first = max(self._sent.get(slot.rank, 0) + 1, last - NUM_RECORDS + 1)
        self._sent[slot.rank] = done
        return bytes(slot.records[np.arange(first, last + 1) % NUM_RECORDS].tobytes())


def unpack_slots(board: JobBoard, packed: Sequence[PackedSlot], ahead_ns: int, mirrored: Mirrored) -> bool:
    """Write slots of other hosts to ``board``; returns whether a rank's state changed, or its end became known.
    ``ahead_ns``: how far the sender's clock is ahead.  Slots of this host's ranks, which write them themselves, are
    skipped."""
    has_news = False
    for rank, head, text, records in packed:
        if board.topology.host_of(rank) != board.host:
            rows = np.frombuffer(records, np.int64).reshape(-1, len(RECORD_FIELDS)).copy()
            words = np.frombuffer(head, np.int64).copy()
            has_news |= _write(board.slots[rank], words, np.frombuffer(text, np.uint8), rows, ahead_ns)
            mirrored(board.slots[rank], rows[rows[:, _DONE] > 0])
    return has_news


def _write(slot: RankSlot, head: Int64s, text: npt.NDArray[np.uint8], records: Int64s, ahead_ns: int) -> bool:
    for index in (*slot.TIME_WORDS, slot.ENDED_WORD):
        head[index] -= ahead_ns if head[index] else 0
    for column in _TIMES_OF_RECORD:
        records[:, column] -= np.where(records[:, column] != 0, ahead_ns, 0)
    slot.records[records[:, _STEP] % NUM_RECORDS] = records
    if len(text):
        slot.text[: len(text)] = text
    ended, state = slot.head[slot.ENDED_WORD : slot.ENDED_WORD + 2].copy(), int(slot.head[_STATE])
    has_news = state != head[_STATE] or bool(head[slot.ENDED_WORD]) != bool(ended[0])
    if ended[0]:  # this host knows already
        head[slot.ENDED_WORD : slot.ENDED_WORD + 2] = ended
    slot.head[:_STATE] = head[:_STATE]
    slot.head[_STATE + 1 :] = head[_STATE + 1 :]
    slot.head[_STATE] = head[_STATE]
    return has_news
