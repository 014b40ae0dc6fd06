"""Process-shared semaphores: how a wait spends its time."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator

import pytest

from tp_engine.ipc.semaphore import SEMAPHORE_BYTES, Semaphore, default_spin_s


@pytest.fixture
def semaphore() -> Iterator[Semaphore]:
    memory = mmap.mmap(-1, SEMAPHORE_BYTES)
    semaphore = Semaphore(memory, 0)
    semaphore.initialise(0)
    yield semaphore
    memory.close()


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "spins"), [(2, 2, True), (2, 3, False), (2, 8, False), (8, 8, True)]
)
def test_ranks_that_outnumber_the_cores_do_not_spin(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_ranks: int, spins: bool
) -> None:
    """Oracle: ranks spin only if each has a core of its own, because a spin takes the core; and only for a short
    time."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(num_cores)))
    spin_s = default_spin_s(num_ranks)
    assert 0 < spin_s <= 50e-6 if spins else spin_s == 0


@pytest.mark.parametrize("spin_s", [0.0, 20e-6])
def test_a_wait_blocks_after_its_spin(semaphore: Semaphore, spin_s: float) -> None:
    """Oracle: the kernel's CPU time of this thread over half a second of waiting: at most a fiftieth of it."""
    began_s, cpu_s = time.monotonic(), time.thread_time()
    assert not semaphore.wait(0.5, spin_s)
    assert time.monotonic() - began_s >= 0.5
    assert time.thread_time() - cpu_s < 0.01


def test_each_post_ends_one_wait(semaphore: Semaphore) -> None:
    """Oracle: counting."""
    assert not semaphore.try_wait()
    for _ in range(3):
        semaphore.post()
    assert [semaphore.try_wait() for _ in range(4)] == [True, True, True, False]
    semaphore.post()
    assert semaphore.wait(0.0)
    assert not semaphore.wait(0.0)
