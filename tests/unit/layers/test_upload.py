"""Uploads through pinned memory that is used in turn.  The copies and streams of a GPU are imitated."""

from __future__ import annotations

import numpy as np
import torch

from tp_engine.layers.upload import Arena, copy_together, upload_all, upload_into

CPU = torch.device("cpu")


class FakeStream:
    """A stream whose events note in ``log`` when they are recorded and waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self._count = 0

    def record_event(self) -> FakeEvent:
        self._count += 1
        self._log.append(f"record {self._name}{self._count}")
        return FakeEvent(f"{self._name}{self._count}", self._log)


class FakeEvent:
    """See ``FakeStream``."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(f"wait {self._name}")


class FakeArena(Arena):
    """Three parts of 64 bytes; ``current`` is the current stream, ``made`` what was allocated for one call alone."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made: list[int] = []
        self.current = FakeStream("a", self.log)
        self.parts = [torch.zeros(64, dtype=torch.uint8) for _ in range(3)]
        super().__init__(self.parts, lambda: self.current, self._make)

    def _make(self, num_bytes: int) -> torch.Tensor:
        self.made.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def part_of(self, room: torch.Tensor) -> tuple[int, int]:
        """The part and the place in it where ``room`` begins."""
        (found,) = [i for i, part in enumerate(self.parts) if 0 <= room.data_ptr() - part.data_ptr() < 64]
        return found, room.data_ptr() - self.parts[found].data_ptr()


def test_parts_are_used_in_turn() -> None:
    """Oracle: by hand: pieces begin at multiples of 16 bytes, and what does not fit begins the next part."""
    arena = FakeArena()
    places = [arena.part_of(arena.take(size)) for size in (10, 16, 32, 33, 31, 64, 1)]
    assert places == [(0, 0), (0, 16), (0, 32), (1, 0), (2, 0), (0, 0), (1, 0)]


def test_a_part_is_used_again_after_its_copies() -> None:
    """Oracle: the order of events: recorded when a part is left, waited for before it is used again; of two streams,
    both."""
    arena = FakeArena()
    arena.take(40)
    other = FakeStream("b", arena.log)
    arena.current, own = other, arena.current
    arena.take(8)
    arena.current = own
    arena.take(64)
    assert sorted(arena.log) == ["record a1", "record b1"]
    arena.take(64)
    arena.take(64)
    assert arena.log[2:4] == ["record a2", "record a3"] and sorted(arena.log[4:]) == ["wait a1", "wait b1"]
    arena.take(64)
    assert arena.log[6:] == ["record a4", "wait a2"]


def test_what_no_part_holds_is_allocated() -> None:
    """Oracle: the sizes asked of the allocator; the parts are left alone."""
    arena = FakeArena()
    arena.take(10)
    assert len(arena.take(65)) == 65 and arena.made == [65]
    assert arena.part_of(arena.take(10)) == (0, 16) and not arena.log


def test_arrays_arrive_together() -> None:
    """Oracle: the arrays; all lie in one tensor, at multiples of 16 bytes; empty and boolean ones too."""
    arrays = [
        np.arange(3, dtype=np.int64), np.array([True, False]), np.empty(0, dtype=np.int32),
        np.arange(4, dtype=np.float32).reshape(2, 2).T, np.array(7, dtype=np.int32),
    ]  # fmt: skip
    arena = FakeArena()
    arena.take(10)
    found = copy_together(arrays, CPU, arena)
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    assert all(tensor.storage_offset() * tensor.itemsize % 16 == 0 for tensor in found)


def test_on_a_cpu_nothing_is_copied() -> None:
    """Oracle: shared memory, and the values."""
    array = np.arange(4)
    (tensor,) = upload_all([array], CPU)
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]
    target = torch.zeros(4, dtype=torch.int64)
    upload_into(target, array)
    array[0] = 5
    assert target.tolist() == [9, 1, 2, 3]
