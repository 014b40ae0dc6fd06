"""The watchdog's verdicts, on boards written by hand and a clock that the test moves."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tp_engine.engine.hang_watch import Hang, HangLimits, HangWatch
from tp_engine.engine.incident import find_incident, where
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import PHASE_WORD, State
from tp_engine.job.progress import RankPhase, RankProgress

SECOND = 1_000_000_000
LIMITS = HangLimits(soft_s=30.0, hard_s=120.0, startup_s=600.0, cpu_proves_life=True)
DEADLINE_S = 20.0


class Jobs:
    """A board on which the test sets what the ranks do, with a clock that the test moves."""

    def __init__(self, num_ranks: int, limits: HangLimits = LIMITS, rank: int = 0) -> None:
        self.board = JobBoard.create(num_ranks)
        self.progresses = []
        self.now_ns = SECOND
        for slot in self.board.slots:
            progress = RankProgress()
            progress.show_on(slot.words, PHASE_WORD)
            self.progresses.append(progress)
            slot.words[0], slot.state = 100 + slot.rank, State.READY
        self.silent: set[int] = set()
        self.burning: set[int] = set()
        self.starving: set[int] = set()
        self.holding: set[int] = set()
        self.stopped: set[int] = set()
        self.watch = HangWatch(self.board, rank, limits, now_ns=self.now_ns, vitals=self.vitals)

    def vitals(self, pid: int) -> tuple[str, int]:
        """A rank that holds its interpreter uses CPU time; the clock's time serves as that."""
        return "T" if pid - 100 in self.stopped else "S", self.now_ns if pid - 100 in self.holding else 1

    def begin(self, step_id: int, *, ranks: list[int], collectives: int) -> None:
        for rank in ranks:
            self.progresses[rank].reach(RankPhase.STEP_BEGIN)
            self.board.slots[rank].begin_step(step_id)
            for _ in range(collectives):
                self.progresses[rank].collective()

    def after(self, seconds: float) -> Hang | None:
        """The watch's verdict after ``seconds`` of half-second ticks."""
        hang = None
        for _ in range(int(seconds * 2)):
            self.now_ns += SECOND // 2
            for slot in self.board.slots:
                if slot.rank not in self.silent:
                    slot.words[2] = self.now_ns
                if slot.rank in self.burning:
                    slot.words[3] += SECOND // 4
                if slot.rank in self.starving:
                    slot.words[3], slot.words[7] = slot.words[3] + SECOND // 100, slot.words[7] + SECOND // 4
            hang = self.watch.look(self.now_ns)
        return hang


def test_an_idle_job_never_hangs() -> None:
    """Oracle: an hour without a step is no hang."""
    jobs = Jobs(2)
    jobs.begin(1, ranks=[0, 1], collectives=3)
    for slot in jobs.board.slots:
        slot.end_step(1)
    assert jobs.after(3600) is None


def test_a_long_but_living_step_never_trips_it() -> None:
    """Oracle: ten minutes in one collective are allowed while one rank computes; the limit applies once it stops."""
    jobs = Jobs(2)
    jobs.begin(1, ranks=[0, 1], collectives=1)
    jobs.burning = {1}
    assert jobs.after(600) is None
    jobs.burning = set()
    assert jobs.after(29) is None
    hang = jobs.after(2)
    assert hang is not None and not hang.is_hard


def test_a_step_that_a_busy_machine_starves_is_no_hang() -> None:
    """Oracle: ten minutes with a fiftieth of a core, and half of the time in the queue for one."""
    jobs = Jobs(1)
    jobs.begin(1, ranks=[0], collectives=0)
    jobs.starving = {0}
    assert jobs.after(600) is None
    jobs.starving = set()
    assert jobs.after(31) is not None


def test_a_rank_that_waits_on_a_busy_machine_proves_no_life() -> None:
    """Oracle: rank 1 sleeps; rank 0, which waits for it, looks around at times, and waits for a core each time."""
    jobs = Jobs(2)
    jobs.begin(1, ranks=[0], collectives=2)
    jobs.begin(1, ranks=[1], collectives=1)
    jobs.starving = {0}
    assert jobs.after(29) is None
    hang = jobs.after(2)
    assert hang is not None and hang.culprits == (1,)


def test_on_gpus_cpu_time_proves_nothing() -> None:
    """Oracle: the same step, with time alone."""
    jobs = Jobs(2, replace(LIMITS, cpu_proves_life=False))
    jobs.begin(1, ranks=[0, 1], collectives=1)
    jobs.burning = {0, 1}
    assert jobs.after(31) is not None


def test_a_stuck_step_names_who_is_behind() -> None:
    """Oracle: rank 1 has not entered the collective that the others wait in; soft, then hard; rank 0 acts."""
    jobs = Jobs(3)
    jobs.begin(12, ranks=[0, 2], collectives=4)
    jobs.begin(12, ranks=[1], collectives=3)
    hang = jobs.after(31)
    assert hang is not None and hang.culprits == (1,) and not hang.is_hard
    assert "rank 1 is in collective 3 of step 12" in hang.text
    hang = jobs.after(90)
    assert hang is not None and hang.is_hard and jobs.watch.acting_rank(hang) == 0


def test_a_rank_that_never_got_the_step_is_behind() -> None:
    """Oracle: rank 1 still waits for step 12, which rank 0 is in."""
    jobs = Jobs(2)
    jobs.begin(11, ranks=[0, 1], collectives=4)
    jobs.board.slots[1].end_step(11)
    jobs.begin(12, ranks=[0], collectives=1)
    hang = jobs.after(31)
    assert hang is not None and hang.culprits == (1,) and "waiting for step 12" in hang.text


def test_a_rank_that_does_not_end_is_named() -> None:
    """Oracle: rank 0 has begun to stop, and never sends the stop plan that rank 1 waits for."""
    jobs = Jobs(2)
    jobs.progresses[0].reach(RankPhase.SHUTDOWN)
    jobs.board.slots[0].state = State.STOPPING
    hang = jobs.after(121)
    assert hang is not None and hang.is_hard and hang.culprits == (0,)
    assert "rank 0 is in shutdown" in hang.text and jobs.watch.acting_rank(hang) == 1


def test_where_all_are_equally_far_nobody_is_named() -> None:
    """Oracle: a collective that does not end although all ranks are in it; rank 0 ends the job."""
    jobs = Jobs(2)
    jobs.begin(12, ranks=[0, 1], collectives=4)
    hang = jobs.after(125)
    assert hang is not None and hang.is_hard and hang.culprits == () and "all ranks are in collective 4" in hang.text
    assert jobs.watch.acting_rank(hang) == 0


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_also_while_idle(stopped: int) -> None:
    """Oracle: no sign of life; the lowest of the other ranks acts."""
    jobs = Jobs(3, rank=2)
    jobs.silent = {stopped}
    assert jobs.after(29) is None
    hang = jobs.after(2)
    assert hang is not None and not hang.is_hard and hang.culprits == (stopped,)
    hang = jobs.after(90)
    assert hang is not None and hang.is_hard and jobs.watch.acting_rank(hang) == 1 - stopped
    jobs.silent = set()
    assert jobs.after(1) is None


def test_a_rank_that_is_late_when_another_is_stopped_is_no_culprit() -> None:
    """Oracle: at the hard limit, only ranks silent for that long end the job."""
    jobs = Jobs(3)
    jobs.silent = {2}
    jobs.after(89)
    jobs.silent = {1, 2}
    hang = jobs.after(33)
    assert hang is not None and hang.is_hard and hang.culprits == (2,)
    hang = jobs.after(120)
    assert hang is not None and hang.is_hard and hang.culprits == (1, 2)


def test_a_rank_that_holds_its_interpreter_lives() -> None:
    """Oracle: ten minutes without a beat but with CPU time, as in a long import, are no hang; without both, there is
    one."""
    jobs = Jobs(2)
    jobs.silent = jobs.holding = {1}
    assert jobs.after(600) is None
    jobs.holding = set()
    assert jobs.after(29) is None
    assert jobs.after(2) is not None


def test_a_rank_that_starts_may_wait_for_a_disk() -> None:
    """Oracle: no beat and no CPU time: half of the start's budget, unless the kernel reports the process as stopped."""
    jobs = Jobs(2)
    for slot, progress in zip(jobs.board.slots, jobs.progresses, strict=True):
        slot.state = State.STARTING
        progress.reach(RankPhase.IMPORT)
    jobs.silent = {1}
    assert jobs.after(299) is None
    assert jobs.after(2) is not None
    jobs = Jobs(2)
    jobs.board.slots[1].state = State.STARTING
    jobs.silent = jobs.stopped = {1}
    hang = jobs.after(31)
    assert hang is not None and hang.culprits == (1,) and "stopped" in hang.text


def test_a_stopped_rank_explains_a_stuck_step() -> None:
    """Oracle: the verdict names the silent rank, not the rank whose position is behind."""
    jobs = Jobs(3, replace(LIMITS, soft_s=10.0))
    jobs.silent = {2}
    jobs.begin(5, ranks=[0], collectives=1)
    jobs.begin(5, ranks=[1, 2], collectives=2)
    hang = jobs.after(10)
    assert hang is not None and hang.culprits == (2,)


def test_a_rank_that_is_late_does_not_explain_a_stuck_step() -> None:
    """Oracle: 5 s of silence do not explain 32 s without progress; the rank that is behind does."""
    jobs = Jobs(3)
    jobs.begin(1, ranks=[0, 1, 2], collectives=1)
    jobs.progresses[0].collective()
    jobs.progresses[2].collective()
    assert jobs.after(25) is None
    jobs.silent = {0}
    hang = jobs.after(7)
    assert hang is not None and hang.culprits == (1,)


def test_who_was_stopped_himself_counts_anew() -> None:
    """Oracle: Ctrl-Z of the whole job for an hour; only the time after it counts."""
    jobs = Jobs(2)
    jobs.begin(1, ranks=[0, 1], collectives=1)
    assert jobs.after(20) is None
    jobs.now_ns += 3600 * SECOND
    jobs.silent = {1}
    assert jobs.after(29) is None
    assert jobs.after(2) is not None


def test_the_start_has_a_budget_of_its_own() -> None:
    """Oracle: half of the limit is soft, the whole is hard; a rank that has done its part is not the culprit."""
    jobs = Jobs(2)
    for slot, progress in zip(jobs.board.slots, jobs.progresses, strict=True):
        slot.state = State.STARTING
        progress.reach(RankPhase.LOAD)
    jobs.progresses[0].done()
    assert jobs.after(299) is None
    hang = jobs.after(2)
    assert hang is not None and not hang.is_hard and hang.culprits == (1,) and "rank 1 is in load" in hang.text
    jobs.progresses[1].done()
    assert jobs.after(299) is None
    hang = jobs.after(302)
    assert hang is not None and hang.is_hard and hang.hard_s == LIMITS.startup_s


def no_code(_rank: int) -> int | None:
    return None


def test_the_cause_is_told_from_its_consequences() -> None:
    """Oracle: the order of the rules: killed, then the first to fail by itself, then the rank that the others blame."""
    board = JobBoard.create(4)
    for slot in board.slots:
        slot.state = State.READY
    assert find_incident(board, 0, [], no_code) is None
    board.slots[2].fail("RankError: rank 3", failed_rank=3)
    found = find_incident(board, 0, [], no_code)
    assert found is not None and found.rank == 3 and "rank 2 reports" in found.message
    board.slots[1].fail("Traceback: the cause")
    board.slots[0].fail("Traceback: the connection was closed")
    found = find_incident(board, 0, [1], lambda rank: 7)
    assert found is not None and found.rank == 1
    assert "ended with exit code 7" in found.message and "the cause" in str(found.error())
    assert find_incident(board, 1, [], no_code) is None  # it is the cause itself
    found = find_incident(board, 0, [3, 1], lambda rank: -signal.SIGKILL)
    assert found is not None and found.rank == 3 and "signal 9" in found.message


def test_an_orderly_end_is_no_incident() -> None:
    """Oracle: a rank that has left and ended."""
    board = JobBoard.create(2)
    board.slots[1].state = State.LEFT
    assert find_incident(board, 0, [1], lambda rank: 0) is None


def test_places_are_told_in_words() -> None:
    """Oracle: the words."""
    jobs = Jobs(1)
    slot, progress = jobs.board.slots[0], jobs.progresses[0]
    progress.reach(RankPhase.LOAD)
    assert where(slot) == "in load"
    jobs.begin(12, ranks=[0], collectives=3)
    assert where(slot) == "in collective 3 of step 12"
    progress.reach(RankPhase.SAMPLE)
    assert where(slot) == "in sample of step 12"
    slot.end_step(12)
    assert where(slot) == "waiting for step 13 (last phase: sample)"
    slot.state = State.ABSENT
    assert where(slot) == "not there yet"


def test_an_end_that_a_gpu_may_have_caused_names_the_gpu() -> None:
    """Oracle: the GPU's text and the kernel's log behind CUDA's error and an abort, for ranks that have a GPU; a killed
    process is not the GPU's doing."""
    board = JobBoard.create(4)
    for slot in board.slots:
        slot.state = State.READY
        slot.note_device("" if slot.rank == 2 else f"GPU {slot.rank} (H100, 1234, bus 0000:3b:00)")

    def message(rank: int, code: int | None) -> str:
        found = find_incident(board, 0, [rank], lambda _rank: code)
        assert found is not None and found.rank == rank
        return found.message

    told = "on GPU 1 (H100, 1234, bus 0000:3b:00); if the driver lost this GPU, the kernel's log says so: dmesg"
    assert told in message(1, -signal.SIGABRT)
    assert "GPU" not in message(1, -signal.SIGKILL) and "GPU" not in message(2, -signal.SIGABRT)
    board.slots[3].fail("torch.AcceleratorError: CUDA error: unspecified launch failure")
    assert "on GPU 3 (H100" in message(3, 1)
