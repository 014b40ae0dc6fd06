"""The fault hook: how faults are written, and what each action does to a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tp_engine.errors import ConfigError
from tp_engine.job.faults import ALWAYS, EXIT_CODE, Fault, fault_injector, parse_faults
from tp_engine.job.progress import RankPhase, RankProgress, split_phase

SCRIPT = """
import sys
from tp_engine.job.faults import fault_injector
from tp_engine.job.progress import RankPhase, RankProgress
progress = RankProgress(fault_injector(int(sys.argv[1])))
progress.reach(RankPhase.LOAD)
print("loaded", flush=True)
"""


def run(rank: int, fault: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(rank)], env={**os.environ, "TP_ENGINE_FAULT": fault},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", EXIT_CODE), ("raise", 1), ("oom", 1)])
def test_actions_that_end_a_process(action: str, code: int) -> None:
    """Oracle: the exit code, on the named rank and on no other."""
    done = run(1, f"1:load:{action}")
    assert done.returncode == code and "loaded" not in done.stdout
    if action in ("raise", "oom"):
        assert "injected by TP_ENGINE_FAULT: rank 1 in load" in done.stderr
    assert run(0, f"1:load:{action}").stdout == "loaded\n"


def test_a_stopped_process_is_stopped() -> None:
    """Oracle: the state that the kernel reports."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "0"], env={**os.environ, "TP_ENGINE_FAULT": "0:load:stop"}
    ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.kill()


def test_the_nth_time_and_no_other() -> None:
    """Oracle: the third of five times raises; collectives count as a phase of their own."""
    progress = RankProgress(fault_injector(2, parse_faults("2:step_begin@3:raise, 2:collective@2:oom")))
    progress.reach(RankPhase.STEP_BEGIN)
    progress.collective()
    progress.reach(RankPhase.STEP_BEGIN)
    with pytest.raises(MemoryError, match="rank 2 in collective"):
        progress.collective()
    with pytest.raises(RuntimeError, match="rank 2 in step_begin"):
        progress.reach(RankPhase.STEP_BEGIN)
    progress.reach(RankPhase.STEP_BEGIN)


def test_each_time() -> None:
    """Oracle: both of two times raise."""
    progress = RankProgress(fault_injector(0, parse_faults("0:move@*:raise")))
    for _ in range(2):
        progress.reach(RankPhase.STEP_BEGIN)
        with pytest.raises(RuntimeError, match="rank 0 in move"):
            progress.reach(RankPhase.MOVE)


def test_a_part_of_a_phase_ends() -> None:
    """Oracle: the word: the step goes on after its moves, and the next collective is its first."""
    word = [0]
    progress = RankProgress()
    progress.show_on(word, 0)
    progress.reach(RankPhase.STEP_BEGIN)
    progress.reach(RankPhase.MOVE)
    assert split_phase(word[0]) == (RankPhase.MOVE, 0)
    progress.back(RankPhase.STEP_BEGIN)
    assert split_phase(word[0]) == (RankPhase.STEP_BEGIN, 0) and progress.phase == RankPhase.STEP_BEGIN
    progress.collective()
    assert split_phase(word[0]) == (RankPhase.COLLECTIVE, 1)


def test_sleeping_ends() -> None:
    """Oracle: the clock."""
    progress = RankProgress(fault_injector(0, parse_faults("0:sample:sleep=0.05")))
    began_s = time.monotonic()
    progress.reach(RankPhase.SAMPLE)
    assert time.monotonic() - began_s >= 0.05


def test_the_word_shows_phase_and_count() -> None:
    """Oracle: the position reached, also after the progress has moved to the board; sampling keeps counting."""
    here, board = [0], [0, 0]
    progress = RankProgress()
    progress.show_on(here, 0)
    progress.reach(RankPhase.LOAD)
    assert split_phase(here[0]) == (RankPhase.LOAD, 0)
    progress.show_on(board, 1)
    progress.done()
    progress.collective()
    assert split_phase(board[1]) == (RankPhase.LOAD, 2)
    progress.reach(RankPhase.STEP_BEGIN)
    for _ in range(300):
        progress.collective()
    assert split_phase(board[1]) == (RankPhase.COLLECTIVE, 300) and split_phase(here[0]) == (RankPhase.LOAD, 0)
    progress.reach(RankPhase.SAMPLE)
    assert split_phase(board[1]) == (RankPhase.SAMPLE, 300) and progress.phase == RankPhase.SAMPLE


def test_a_rank_that_fails_in_a_collective_is_behind_the_others() -> None:
    """Oracle: the word names the phase, and does not count the collective that the rank did not enter."""
    word = [0]
    progress = RankProgress(fault_injector(1, parse_faults("1:collective@2:raise")))
    progress.show_on(word, 0)
    progress.reach(RankPhase.STEP_BEGIN)
    progress.collective()
    with pytest.raises(RuntimeError):
        progress.collective()
    assert split_phase(word[0]) == (RankPhase.COLLECTIVE, 1)


def test_a_fault_says_everything() -> None:
    """Oracle: the fields, with their defaults."""
    assert parse_faults("") == ()
    assert parse_faults(" 1:load:kill,0:sample@4:sleep=2.5 ") == (
        Fault(rank=1, phase=RankPhase.LOAD, action="kill"),
        Fault(rank=0, phase=RankPhase.SAMPLE, action="sleep", nth=4, sleep_s=2.5),
    )
    assert parse_faults("1:move@*:sleep=1") == (
        Fault(rank=1, phase=RankPhase.MOVE, action="sleep", nth=ALWAYS, sleep_s=1.0),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("load:kill", "three parts"),
        ("x:load:kill", "'x' is no rank"),
        ("1:none:kill", "'none' is no phase"),
        ("1:load@0:kill", "'0' is no count"),
        ("1:load@:kill", "'' is no count"),
        ("1:load:explode", "'explode' is no action"),
        ("1:load:kill=3", "'kill=3' is no action"),
        ("1:load:sleep=soon", "'soon' is no number"),
    ],
)
def test_a_bad_fault_is_refused(text: str, why: str) -> None:
    """Oracle: the error names the part, the rule and an example."""
    with pytest.raises(ConfigError, match=why) as refused:
        parse_faults("0:load:raise," + text)
    assert repr(text) in str(refused.value) and "1:load:kill" in str(refused.value)
