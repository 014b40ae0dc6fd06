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
        "the cores are busy (threads lacked one for 50 % of the time): as long as that lasts, those that wait for each "
        "other sleep instead of spinning"
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


def test_a_team_that_can_not_be_made_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: threads go on spinning, and one line tells the remedy."""
    tries = []
    waiting = Waiting(lambda: tries.append(1))
    clock = Clock(waiting)
    clock.periods(BUSY, 5)
    assert len(tries) == 1 and not waiting.is_asleep
    assert [record.getMessage() for record in caplog.records if "GOMP_SPINCOUNT=1000" in record.getMessage()]


REAL_TEAM = """
import os, time, torch
from tp_engine.cpu.waiting import IdleTeam

{before}
torch.set_num_threads(2)
torch.ones(1 << 20).sum()
def threads(wanted):  # beyond those of before; what has been joined leaves the list a little later
    deadline = time.monotonic() + 30
    while (found := len(os.listdir("/proc/self/task")) - before) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
before = len(os.listdir("/proc/self/task"))
team = IdleTeam.make()
during = threads({during})
if team is not None:
    team.close()
print(team is not None, during, threads(0), torch.ones(1 << 20).sum().item())
"""


def run_team(during: int, before: str = "", **environment: str) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", **environment}
    done = subprocess.run(
        [sys.executable, "-c", REAL_TEAM.format(before=before, during=during)],
        capture_output=True, text=True, timeout=120, check=True, env=environment,
    )  # fmt: skip
    return done.stdout.split()


def test_the_idle_team_is_what_is_missing_beyond_all_processors() -> None:
    """Oracle: libgomp's rule is asked of threads beyond the processors.  Beside the two that compute there are the
    holder and what is missing to one more than the processors, none of them is left after the end, and torch computes
    as before."""
    missing = len(os.sched_getaffinity(0)) - 2 + 1
    assert run_team(1 + missing) == ["True", str(1 + missing), "0", "1048576.0"]


@pytest.mark.parametrize(
    "before, environment",
    [
        # What a container's limit of threads does, which root does not feel: libgomp would end the process.
        ("import threading; threading.Thread.start = lambda thread: (_ for _ in ()).throw(RuntimeError('no'))", {}),
        ("", {"OMP_DYNAMIC": "true"}),
        ("", {"OMP_THREAD_LIMIT": "1"}),
    ],
)
def test_a_process_that_may_not_have_the_threads_lives_on(before: str, environment: dict[str, str]) -> None:
    """Oracle: there is no team, nothing is left of the attempt, and torch computes as before."""
    assert run_team(0, before, **environment) == ["False", "0", "0", "1048576.0"]
