"""How OpenMP's threads wait: when they sleep instead of spinning, and that a process can switch between the two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tp_engine.cpu.waiting import CoreTime, Waiting, can_sleep, thread_times

BUSY, QUIET, IDLE = (0.5, 0.5), (0.5, 0.001), (0.0, 0.0)  # seconds that two threads ran, and waited, in a period


class Teams:
    """Counts the teams that are alive, in place of real ones."""

    def __init__(self) -> None:
        self.alive = self.made = 0

    def __call__(self) -> Teams:
        self.alive, self.made = self.alive + 1, self.made + 1
        return self

    def close(self) -> None:
        self.alive -= 1


class Clock:
    """Periods, as cumulative times of two threads."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting, self.ran, self.waited = waiting, 0.0, 0.0
        waiting.note(self.times())

    def times(self) -> dict[int, CoreTime]:
        return {thread: CoreTime(self.ran / 2, self.waited / 2) for thread in (1, 2)}

    def periods(self, kind: tuple[float, float], number: int = 1) -> None:
        for _ in range(number):
            self.ran, self.waited = self.ran + kind[0], self.waited + kind[1]
            self.waiting.note(self.times())


def test_threads_sleep_while_cores_are_missing() -> None:
    """Oracle: one busy period puts them to sleep, ten quiet ones in a row wake them; idle ones say nothing."""
    teams = Teams()
    waiting = Waiting(teams)
    clock = Clock(waiting)
    clock.periods(QUIET, 20)
    assert not waiting.is_asleep
    clock.periods(BUSY)
    assert waiting.is_asleep
    for _ in range(3):
        clock.periods(QUIET, 9)
        clock.periods(BUSY)
    clock.periods(IDLE, 50)
    assert (teams.alive, teams.made) == (1, 1)
    clock.periods(QUIET, 10)
    assert teams.alive == 0 and not waiting.is_asleep
    clock.periods(BUSY)
    assert (teams.alive, teams.made) == (1, 2)
    waiting.close()
    waiting.close()
    assert teams.alive == 0


def test_threads_that_come_and_go_are_no_contention() -> None:
    """Oracle: only threads of both ends of a period are compared, however long another has lived."""
    teams = Teams()
    waiting = Waiting(teams)
    waiting.note({1: CoreTime(1.0, 0.0), 2: CoreTime(5.0, 900.0)})
    waiting.note({1: CoreTime(1.4, 0.0), 3: CoreTime(0.1, 50.0)})
    assert teams.made == 0


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a machine that is busy again and again is told of with the first switch alone."""
    waiting = Waiting(Teams())
    clock = Clock(waiting)
    with caplog.at_level("INFO", logger="tp_engine"):
        for _ in range(3):
            clock.periods(BUSY)
            clock.periods(QUIET, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "other programs need the cores (threads lacked one for 50 % of the time): as long as that lasts, those that "
        "wait for each other sleep instead of spinning"
    ]


def test_own_times_are_counted() -> None:
    """Oracle: the main thread is among them, and has run."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count how long threads wait for a core")
    assert thread_times()[os.getpid()].ran > 0


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_says_holds(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: with a policy of the user's, nothing is watched."""
    for decided in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(decided, raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert can_sleep()
    monkeypatch.setenv(variable, "1000")
    assert not can_sleep()


def test_a_single_thread_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: there is nothing to watch."""
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert not can_sleep()


REAL_TEAM = """
import os, time, torch
from tp_engine.cpu.waiting import IdleTeam

torch.set_num_threads(2)
torch.ones(1 << 20).sum()
def threads(): return len(os.listdir("/proc/self/task"))
before, deadline = threads(), time.monotonic() + 60
team = IdleTeam()
while threads() < before + 1 + len(os.sched_getaffinity(0)) and time.monotonic() < deadline: time.sleep(0.01)
during = threads() - before
team.close()
while threads() > before and time.monotonic() < deadline: time.sleep(0.01)
print(during - len(os.sched_getaffinity(0)), threads() - before, torch.ones(1 << 20).sum().item())
"""


def test_the_idle_team_is_more_than_all_processors() -> None:
    """Oracle: libgomp's rule is asked of threads beyond the processors: the holder and one for each processor, none of
    them left after the end, and torch computes as before."""
    done = subprocess.run([sys.executable, "-c", REAL_TEAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "0", "1048576.0"]
