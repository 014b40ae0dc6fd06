"""The watchdog among real processes.  Oracle: what the processes do."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tp_engine.engine.hang_watch import HangLimits
from tp_engine.engine.peers import Peers, ProcessHandle, living_ranks
from tp_engine.engine.watchdog import Watchdog
from tp_engine.errors import RankError
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import State

SECOND = 1_000_000_000
LIMITS = HangLimits(soft_s=30.0, hard_s=120.0, startup_s=600.0, cpu_proves_life=True)
DEADLINE_S = 100.0

RANK = """
import sys, time
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import State
slot = JobBoard.open(sys.argv[1]).slots[int(sys.argv[2])]
slot.register()
slot.state = State.READY
print("here", flush=True)
while True:
    slot.beat()
    time.sleep(0.05)
"""


@contextmanager
def rank_process(board: JobBoard, rank: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RANK, board.address, str(rank)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def watchdog(board: JobBoard, limits: HangLimits = LIMITS) -> Iterator[Watchdog]:
    board.slots[0].register()
    board.slots[0].state = State.READY
    dog = Watchdog(board, 0, limits, ends_process=False, may_kill=True)
    dog.start()
    try:
        yield dog
    finally:
        dog.stop()


def check_for_a_while(dog: Watchdog) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        dog.check()
        time.sleep(0.01)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_death_is_seen_and_the_other_ranks_end() -> None:
    """Oracle: real processes: one is killed and named; the other, which would wait forever, is killed too."""
    board = JobBoard.create(3)
    with rank_process(board, 1) as first, rank_process(board, 2) as second, watchdog(board) as dog:
        dog.check()
        first.kill()
        with pytest.raises(RankError, match=f"rank 1: process {first.pid} is gone"):
            check_for_a_while(dog)
        assert second.wait(DEADLINE_S) == -signal.SIGKILL
        with pytest.raises(RankError, match="rank 1"):
            dog.check()


def test_a_death_is_seen_through_a_high_descriptor() -> None:
    """Oracle: a real process; a script may have thousands of files open, and ``select`` takes no descriptor above
    1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        handle = ProcessHandle(process.pid)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
            if (low := handle.descriptor) is not None:
                handle.descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
                os.close(low)
            assert not handle.has_ended()
            handle.kill()
            handle.wait()
            assert handle.has_ended()
        finally:
            handle.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stopped_process_is_killed_at_the_hard_limit() -> None:
    """Oracle: SIGSTOP; the soft limit is logged once; the hard one ends the process, which could not end itself."""
    board = JobBoard.create(2)
    limits = HangLimits(soft_s=0.6, hard_s=1.5, startup_s=60.0, cpu_proves_life=True)
    with rank_process(board, 1) as process, watchdog(board, limits) as dog:
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: dog.hang is not None)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        with pytest.raises(RankError, match="rank 1: stopped, without a sign of life"):
            dog.check()


def test_a_pid_of_another_process_is_not_touched() -> None:
    """Oracle: a slot whose process has ended and whose pid another process has: that process survives, the rank is
    gone."""
    board = JobBoard.create(2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        slot = board.slots[1]
        slot.words[1], slot.words[0], slot.state = 1, stranger.pid, State.READY
        peers = Peers(board, 0)
        peers.refresh()
        assert peers.gone() == [1]
        peers.kill_all()
        time.sleep(0.05)
        assert stranger.poll() is None
        stranger.communicate(b"\n")
        peers.close()


def test_a_kernel_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: pid and start time suffice to see a death and to kill a stopped process."""

    def none(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", none)
    board = JobBoard.create(3)
    with rank_process(board, 1) as first, rank_process(board, 2) as second, watchdog(board) as dog:
        dog.check()
        second.send_signal(signal.SIGSTOP)
        first.kill()
        with pytest.raises(RankError, match="rank 1: process"):
            check_for_a_while(dog)
        assert second.wait(DEADLINE_S) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        ProcessHandle(os.getpid(), 1)


@pytest.mark.slow
def test_watching_costs_nothing() -> None:
    """Oracle: CPU time over a second, below 1 % of a core, and no thread remains."""
    board = JobBoard.create(2)
    num_threads = threading.active_count()
    with rank_process(board, 1), watchdog(board):
        time.sleep(0.6)  # the thread has started
        began_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - began_s < 0.01
    assert threading.active_count() == num_threads


def test_no_descriptor_is_left() -> None:
    """Oracle: this process's descriptors."""
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        board = JobBoard.create(2)
        with rank_process(board, 1), watchdog(board):
            pass
        board.stop_sharing()
    del board  # Python's mmap holds a descriptor of its own
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_launched_rank_that_ended_before_it_came_is_named() -> None:
    """Oracle: no error while a process with the launcher's variables and the rank lives, then one that names the rank;
    the same rank of another job does not count."""
    marks = {"TORCHELASTIC_RUN_ID": f"of the test {os.getpid()}", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    own = {**os.environ, **marks, "RANK": "1"}
    foreign = {**own, "MASTER_PORT": "2"}
    board = JobBoard.create(2)
    with (
        subprocess.Popen(command, env=own, stdout=subprocess.PIPE) as rank,
        subprocess.Popen(command, env=foreign, stdout=subprocess.PIPE) as other,
    ):
        for process in (rank, other):
            assert process.stdout is not None and process.stdout.readline() == b"here\n"
        assert living_ranks(marks) == {1}
        rank.kill()
        rank.wait()
        assert living_ranks(marks) == set()
        with watchdog(board) as dog:
            dog.peers.marks = marks
            with pytest.raises(RankError, match="rank 1: its process ended before it came to this engine"):
                check_for_a_while(dog)
        other.kill()
