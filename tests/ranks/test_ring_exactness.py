"""The ring between processes, at length: every reader gets every byte of every message, whatever other readers do."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest
import xxhash

from tp_engine.errors import RankError
from tp_engine.ipc.ring_buffer import RingReader, RingWriter

TIMEOUT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")
NUM_MESSAGES = 100_000
LARGEST = 20_000
NUM_SLOTS, SLOT_BYTES = 16, 1024  # 16 KiB: the largest messages do not fit, and the ring wraps 15,000 times
LEAVES_AFTER = 1_000


def messages(count: int) -> Iterator[bytes]:
    """Messages of random bytes, mostly short; the same in every process."""
    rng = random.Random(8)
    noise = rng.randbytes(1 << 20)
    for _ in range(count):
        size = int(LARGEST ** rng.random())
        start = rng.randrange(len(noise) - size)
        yield noise[start : start + size]


class Digest:
    """One hash over the sizes and the bytes of all messages so far."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, message: bytes | bytearray) -> None:
        self._hash.update(len(message).to_bytes(8, "little"))
        self._hash.update(message)

    def value(self) -> str:
        return self._hash.hexdigest()


def expected_digest(count: int) -> str:
    digest = Digest()
    for message in messages(count):
        digest.add(message)
    return digest.value()


def read_until_it_comes(reader: RingReader) -> bytearray:
    """Read with a deadline of 10 microseconds, again and again; the error may come anywhere within a message."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        with suppress(RankError):
            return reader.read(10e-6)
    raise TimeoutError


def read_all(name: str, index: int, habit: str, count: int, pipe: Connection) -> None:
    """A reader's main function: read all messages and send their digest."""
    if habit == "late":
        time.sleep(0.5)
    reader = RingReader(name, index)
    digest = Digest()
    for number in range(count):
        if habit == "slow" and number % 1000 == 0:
            time.sleep(0.002)
        digest.add(read_until_it_comes(reader) if habit == "raising" else reader.read(TIMEOUT_S))
    pipe.send(digest.value())
    reader.close()


class Readers:
    """One process per habit, each with a reader of the ring."""

    def __init__(self, name: str, habits: list[str], counts: list[int]) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for index, (habit, count) in enumerate(zip(habits, counts, strict=True)):
            ours, theirs = SPAWN.Pipe(duplex=False)
            self._pipes.append(ours)
            self._processes.append(SPAWN.Process(target=read_all, args=(name, index, habit, count, theirs)))
            self._processes[-1].start()

    def digests(self) -> list[str]:
        received = []
        for pipe in self._pipes:
            assert pipe.poll(TIMEOUT_S), "a reader did not finish"
            received.append(pipe.recv())
        return received

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(TIMEOUT_S)


@pytest.mark.slow
def test_a_hundred_thousand_messages() -> None:
    """Oracle: a digest over all sizes and bytes; readers are quick, slow or late, or their reads often raise."""
    habits = ["quick", "slow", "late", "raising"]
    writer = RingWriter(len(habits), num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES)
    readers = Readers(writer.name, habits, [NUM_MESSAGES] * len(habits))
    try:
        sent = messages(NUM_MESSAGES)
        for _ in range(3):  # before the late one is there
            writer.write(next(sent), TIMEOUT_S)
        writer.wait_attached(TIMEOUT_S)
        for message in sent:
            writer.write(message, TIMEOUT_S)
        assert readers.digests() == [expected_digest(NUM_MESSAGES)] * len(habits)
    finally:
        readers.stop()
        writer.close()


def test_a_reader_that_fails_takes_nothing_from_the_others() -> None:
    """Oracle: the error names the rank of the lost reader; the other reader has every message written before."""
    writer = RingWriter(2, num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES)
    readers = Readers(writer.name, ["quick", "quick"], [LEAVES_AFTER, LEAVES_AFTER + 1])
    try:
        writer.wait_attached(TIMEOUT_S)
        with pytest.raises(RankError, match="rank 1: did not make room in its ring"):
            for message in messages(NUM_MESSAGES):
                writer.write(message, 0.5)
        assert readers.digests() == [expected_digest(LEAVES_AFTER), expected_digest(LEAVES_AFTER + 1)]
    finally:
        readers.stop()
        writer.close()
