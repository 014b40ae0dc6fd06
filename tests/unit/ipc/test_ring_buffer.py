"""The shared-memory ring: exact for any message size and reader speed, bounded waits, no leftovers."""

from __future__ import annotations

import math
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import xxhash

from tp_engine.errors import RankError
from tp_engine.ipc.ring_buffer import RingReader, RingWriter

TIMEOUT_S = 100.0
SPAWN = multiprocessing.get_context("spawn")


def random_messages(seed: int, count: int, largest: int) -> Iterator[bytes]:
    """``count`` messages, mostly small, each a slice of one random megabyte; both sides draw the same messages."""
    rng = random.Random(seed)
    noise = rng.randbytes(1 << 20)
    for _ in range(count):
        size = int(largest ** rng.random())
        start = rng.randrange(len(noise) - size)
        yield noise[start : start + size]


def digest_of(messages: Iterator[bytes] | Iterator[bytearray]) -> str:
    """One hash over the sizes and the bytes of all messages."""
    digest = xxhash.xxh3_128()
    for message in messages:
        digest.update(len(message).to_bytes(8, "little"))
        digest.update(message)
    return digest.hexdigest()


def read_in_process(name: str, index: int, count: int, pause_s: float, pipe: Connection) -> None:
    """A reader's whole life; sends the digest of its messages, and its CPU seconds while reading."""
    reader = RingReader(name, index)
    began_s = time.process_time()

    def messages() -> Iterator[bytearray]:
        for number in range(count):
            if pause_s and number % 1000 == 0:
                time.sleep(pause_s)
            yield reader.read(TIMEOUT_S)

    digest = digest_of(messages())
    pipe.send((digest, time.process_time() - began_s))
    reader.close()


class Readers:
    """Reader processes of one ring, started by spawn."""

    def __init__(self, writer: RingWriter, count: int, pauses_s: list[float]) -> None:
        self._pipes = []
        self.processes = []
        for index, pause_s in enumerate(pauses_s):
            ours, theirs = SPAWN.Pipe(duplex=False)
            process = SPAWN.Process(target=read_in_process, args=(writer.name, index, count, pause_s, theirs))
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)

    def results(self) -> list[tuple[str, float]]:
        results = [pipe.recv() for pipe in self._pipes]
        for process in self.processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
        return results


@pytest.fixture
def ring() -> Iterator[Callable[..., tuple[RingWriter, list[RingReader]]]]:
    """``ring(num_readers, num_slots=..., slot_bytes=...)`` -> the writer and its readers, all in this process."""
    ends: list[RingWriter | RingReader] = []

    def make(num_readers: int = 1, **options: Any) -> tuple[RingWriter, list[RingReader]]:
        writer = RingWriter(num_readers, **options)
        ends.append(writer)
        readers = [RingReader(writer.name, index) for index in range(num_readers)]
        ends.extend(readers)
        writer.wait_attached(1.0)
        return writer, readers

    yield make
    for end in ends:
        end.close()


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(64, 65536), (4, 64)])
def test_processes_read_exactly_what_was_written(num_slots: int, slot_bytes: int) -> None:
    """Oracle: a digest over all sizes and bytes.  One reader is slow, so the ring runs full and wraps many times."""
    count, largest = (20_000, 200_000) if slot_bytes > 64 else (2_000, 2_000)
    writer = RingWriter(2, num_slots=num_slots, slot_bytes=slot_bytes)
    readers = Readers(writer, count, [0.0, 0.02])
    writer.wait_attached(TIMEOUT_S)
    for message in random_messages(7, count, largest):
        writer.write(message, TIMEOUT_S)
    expected = digest_of(random_messages(7, count, largest))
    assert [digest for digest, _ in readers.results()] == [expected, expected]
    writer.close()


def test_idle_reader_uses_no_cpu() -> None:
    """Oracle: the reader's own process time, under 1 % of one idle second."""
    writer = RingWriter(1)
    readers = Readers(writer, 1, [0.0])
    writer.wait_attached(TIMEOUT_S)
    time.sleep(1.0)
    writer.write(b"now", TIMEOUT_S)
    ((_, cpu_s),) = readers.results()
    writer.close()
    assert cpu_s < 0.01


@pytest.mark.parametrize("num_slots", [1, 3])
def test_threads_with_tiny_slots(ring: Callable[..., tuple[RingWriter, list[RingReader]]], num_slots: int) -> None:
    """Oracle: equality with the written messages; every message but the smallest is larger than the whole ring."""
    writer, readers = ring(3, num_slots=num_slots, slot_bytes=24)
    messages = [*random_messages(num_slots, 300, 500), b"", b"x" * 16, b"y" * 17]

    def drain(reader: RingReader) -> list[bytearray]:
        return [reader.read(TIMEOUT_S) for _ in messages]

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(drain, reader) for reader in readers]
        for message in messages:
            writer.write(message, TIMEOUT_S)
        for future in futures:
            assert future.result() == messages


def test_wraparound_at_every_offset(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: equality, for each number of unread messages from 1 to a full ring, at each position of the ring."""
    writer, (reader,) = ring(1, num_slots=5, slot_bytes=32)
    for unread in range(1, 6):
        for position in range(5):
            sent = [f"{unread}/{position}/{number}".encode() for number in range(unread)]
            for message in sent:
                writer.write(memoryview(message), 0.0)
            assert [reader.read(0.0) for _ in sent] == sent
        writer.write(b"shift by one", 0.0)
        reader.read(0.0)


def test_calls_change_no_message(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: equality with the written messages, with calls before messages, many in a row, and into full rings."""
    writer, readers = ring(2, num_slots=3, slot_bytes=24, spin_s=1e-6)
    messages = [*random_messages(5, 300, 200)]

    def drain(reader: RingReader) -> list[bytearray]:
        return [reader.read(TIMEOUT_S) for _ in messages]

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(drain, reader) for reader in readers]
        for number, message in enumerate(messages):
            for _ in range(number % 4):
                writer.call()
            writer.write(message, TIMEOUT_S)
        for future in futures:
            assert future.result() == messages


def test_a_called_reader_has_a_moment_until_the_message_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: counted calls.  The writer is slow once, so that the moment ends with the message, and quick once."""
    calls: list[None] = []

    def begin() -> float:
        calls.append(None)
        writer.write(b"slow", 1.0)
        return 0.0

    writer = RingWriter(1, num_slots=8, slot_bytes=24, spin_s=1e-6)
    reader = RingReader(writer.name, 0)
    monkeypatch.setattr(reader._call_spin, "begin", begin)
    writer.call()
    assert reader.read(1.0) == b"slow" and len(calls) == 1
    writer.call()
    writer.write(b"quick, in pieces of sixteen", 1.0)
    assert reader.read(1.0) == b"quick, in pieces of sixteen" and len(calls) == 1
    reader.close()
    writer.close()


def test_a_call_waits_for_nobody(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: one reader's ring is full, so no reader is called, and the other readers lose no slot."""
    writer, (quick, slow) = ring(2, num_slots=2, slot_bytes=24, spin_s=1e-6)
    for number in range(2):
        writer.write(bytes([number]), 1.0)
        assert quick.read(1.0) == bytes([number])
    for _ in range(5):
        writer.call()
    assert [slow.read(1.0), slow.read(1.0)] == [b"\0", b"\1"]
    for number in range(2):
        writer.write(bytes([number]), 0.0)
    assert [quick.read(1.0), quick.read(1.0)] == [b"\0", b"\1"]


def test_no_calls_where_ranks_share_cores(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: a ring of one slot still has room after ``call``, which elsewhere takes a slot."""
    writer, (reader,) = ring(1, num_slots=1, slot_bytes=24, spin_s=0.0)
    writer.call()
    writer.write(b"room", 0.0)
    assert reader.read(1.0) == b"room"


def test_a_called_reader_that_gets_nothing_blocks_again() -> None:
    """Oracle: the reader's process time over a second with one call, under 1 %."""
    writer = RingWriter(1, spin_s=1e-6)
    readers = Readers(writer, 1, [0.0])
    writer.wait_attached(TIMEOUT_S)
    writer.call()
    time.sleep(1.0)
    writer.write(b"now", TIMEOUT_S)
    ((_, cpu_s),) = readers.results()
    writer.close()
    assert cpu_s < 0.01


def test_full_ring_names_the_rank_that_does_not_read(
    ring: Callable[..., tuple[RingWriter, list[RingReader]]],
) -> None:
    """Oracle: reader 1 of three is rank 2; the deadline holds; the writer stays failed; earlier messages are intact."""
    writer, (first, slow, last) = ring(3, num_slots=2, slot_bytes=64)
    for number in range(2):
        writer.write(bytes([number]), 1.0)
        assert first.read(1.0) == last.read(1.0) == bytes([number])
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 2: did not make room") as failure:
        writer.write(b"no room", 0.2)
    assert failure.value.rank == 2
    assert 0.2 <= time.monotonic() - began < TIMEOUT_S
    assert [slow.read(1.0), slow.read(1.0)] == [b"\0", b"\1"]
    with pytest.raises(RankError, match="rank 2"):
        writer.write(b"again", 1.0)


def test_an_interrupted_write_is_the_last(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: a handler raises while the writer waits for room: a later write refuses to send half a message."""
    writer, _ = ring(1, num_slots=1, slot_bytes=64)
    writer.write(b"fills the ring", 1.0)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            writer.write(b"no room", TIMEOUT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(RuntimeError, match="an earlier step plan was interrupted"):
        writer.write(b"again", TIMEOUT_S)


def test_silent_writer_is_rank_0_and_a_later_read_goes_on(
    ring: Callable[..., tuple[RingWriter, list[RingReader]]],
) -> None:
    """Oracle: the error at the deadline names rank 0, once before and once in the middle of a message; no byte is
    lost."""
    writer, (reader,) = ring(1, num_slots=1, slot_bytes=16)
    with pytest.raises(RankError, match=r"rank 0: sent no step plan within 0\.05 s"):
        reader.read(0.05)
    message = bytes(range(20))
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(writer.write, message, TIMEOUT_S)
        while not written.done():
            with suppress(RankError):
                assert reader.read(0.0) == message
                break
        written.result()


def test_alive_ends_a_wait_at_once(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: the callback gets the awaited rank; False ends a wait of 60 s within its next slice."""
    writer = RingWriter(2, num_slots=1, alive=lambda rank: rank != 2)
    reader = RingReader(writer.name, 0, alive=lambda: False)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 2: did not attach to shared memory: its process is gone"):
        writer.wait_attached(60.0)
    with pytest.raises(RankError, match="rank 0: sent no step plan: its process is gone"):
        reader.read(math.inf)
    writer.write(b"fills both", 1.0)
    reader.read(1.0)
    with pytest.raises(RankError, match="rank 2: did not make room in its ring for a step plan: its process is gone"):
        writer.write(b"reader 1 never came", 60.0)
    assert time.monotonic() - began < 5.0
    reader.close()
    writer.close()


def test_late_reader_gets_everything() -> None:
    """Oracle: messages written before a reader attaches are its first messages."""
    writer = RingWriter(2, num_slots=8, slot_bytes=64)
    early = RingReader(writer.name, 0)
    for number in range(5):
        writer.write(bytes([number]), 1.0)
    late = RingReader(writer.name, 1)
    writer.wait_attached(1.0)
    for reader in (early, late):
        assert [reader.read(1.0) for _ in range(5)] == [bytes([number]) for number in range(5)]
        reader.close()
    writer.close()


def test_missing_readers_are_named_and_may_still_come() -> None:
    """Oracle: ranks 1 and 3 are missing when only reader 1 (rank 2) has attached; a second wait finds all."""
    writer = RingWriter(3)
    readers = [RingReader(writer.name, 1)]
    with pytest.raises(RankError, match=r"rank 1: did not attach .* within 0.1 s \(missing ranks: \[1, 3\]\)"):
        writer.wait_attached(0.1)
    readers += [RingReader(writer.name, 0), RingReader(writer.name, 2)]
    writer.wait_attached(1.0)
    writer.close()
    for reader in readers:
        reader.close()


def test_signal_does_not_shorten_a_wait(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: handlers run during the wait, which still lasts until its deadline; a handler that raises ends it."""
    _, (reader,) = ring(1)
    seen: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        began = time.monotonic()
        with pytest.raises(RankError):
            reader.read(1.0)
        assert time.monotonic() - began >= 1.0
        assert len(seen) > 3
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # once: a second one could come behind this block
            reader.read(TIMEOUT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_blocked_reader_wakes_at_once(ring: Callable[..., tuple[RingWriter, list[RingReader]]]) -> None:
    """Oracle: a reader that blocks in the kernel has the message long before its next wait slice of 0.5 s; on a busy
    machine, in the best of five attempts."""
    writer, (reader,) = ring(1)
    written_at: list[float] = []

    def write_later() -> None:
        time.sleep(0.05)
        written_at.append(time.monotonic())
        writer.write(b"wake", TIMEOUT_S)

    def latency_s() -> float:
        thread = threading.Thread(target=write_later)
        thread.start()
        reader.read(TIMEOUT_S)
        read_at = time.monotonic()
        thread.join()
        return read_at - written_at[-1]

    assert any(latency_s() < 0.25 for _ in range(5))
