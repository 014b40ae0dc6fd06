"""The job's board: one process writes, another reads; no name is left in a folder; a write costs microseconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tp_engine.errors import RankError
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import (
    MEMORY_LINES,
    NUM_RECORDS,
    OTHER,
    PHASE_WORD,
    RECORD_FIELDS,
    STARTUP_PHASES,
    State,
    echo_word,
    process_start,
    split_echo,
)
from tp_engine.job.progress import RankPhase, RankProgress

RANK_1 = """
import sys
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import PHASE_WORD, State
slot = JobBoard.open(sys.argv[1]).slots[1]
slot.register()
progress = RankProgress()
progress.show_on(slot.words, PHASE_WORD)
progress.reach(RankPhase.STEP_BEGIN)
progress.collective()
progress.collective()
slot.note_received(7, 0x1234567890)
slot.begin_step(7)
slot.records[7 % 512] = range(9)
slot.fail("x" * 9000 + "the end \u20ac")
"""


def test_what_a_process_writes_another_reads() -> None:
    """Oracle: the values in the script above, and the process's own pid and start time."""
    board = JobBoard.create(2)
    with subprocess.Popen([sys.executable, "-c", RANK_1, board.address]) as process:
        assert process.wait(30) == 0
    slot = board.slots[1]
    assert (slot.pid, slot.state) == (process.pid, State.FAILED) and slot.started_ticks > 0
    assert 0 < slot.heartbeat_ns <= slot.failed_ns <= time.monotonic_ns() and slot.cpu_ns > 0
    assert (slot.phase, slot.count) == (RankPhase.COLLECTIVE, 2)
    assert (slot.step_received, slot.step_started, slot.step_done) == (7, 7, 0) and slot.busy_since_ns > 0
    assert split_echo(board.slots[1].echoes[7]) == (7, 0x34567890)
    assert slot.records[7].tolist() == list(range(9)) and not slot.records[:7].any() and not slot.records[8:].any()
    assert slot.failure_text.endswith("xthe end \u20ac") and len(slot.failure_text.encode()) == 8192
    assert slot.exit_code is None and slot.failed_rank is None
    assert not any(board.slots[0].words)


def test_the_slots_of_a_board_do_not_touch() -> None:
    """Oracle: every word of one slot set, all words of its neighbours zero."""
    board = JobBoard.create(3)
    middle = board.slots[1]
    for index in range(len(middle.words)):
        middle.words[index] = -1
    assert not any(board.slots[0].words) and not any(board.slots[2].words)
    assert (middle.records == -1).all() and set(middle.echoes) == set(middle.inputs) == {-1}
    assert middle.records.shape == (NUM_RECORDS, len(RECORD_FIELDS))


def test_lines_and_phases_that_have_no_word_share_one() -> None:
    """Oracle: every listed line and phase, an unlisted one of each as ``OTHER``, and all their neighbours unchanged."""
    slot = JobBoard.create(1).slots[0]
    for index in range(1000, 1016):
        slot.note_received(index, 0xFFFFFFFF)
        slot.note_inputs(index, 0xFFFFFFFF)
    slot.fail("the text")
    slot.records[:] = -1
    echoes, inputs = slot.echoes.tolist(), slot.inputs.tolist()
    lines = {name: number for number, name in enumerate(MEMORY_LINES, start=1)}
    phases = {name: float(number) for number, name in enumerate(STARTUP_PHASES, start=1)}
    slot.note_memory({"host tier": 500, **lines, "later_line": 1 << 40})
    slot.note_startup({**phases, "reading adapters": 0.25, "pinning": 0.5})
    assert slot.memory == {**lines, OTHER: 500 + (1 << 40)}
    assert list(slot.startup_s) == [*STARTUP_PHASES, OTHER]
    assert slot.startup_s == pytest.approx({**phases, OTHER: 0.75})
    assert (slot.echoes.tolist(), slot.inputs.tolist(), slot.failure_text) == (echoes, inputs, "the text")
    assert (slot.records == -1).all()
    slot.note_memory(lines)
    slot.note_startup({"pinning": 0.0})
    assert slot.memory == lines and slot.startup_s == pytest.approx({OTHER: 1e-6})


def test_a_board_without_its_owner_can_not_be_opened() -> None:
    """Oracle: the error for an address after the sharing has stopped, and for that of an ended process."""
    board = JobBoard.create(1)
    JobBoard.open(board.address)
    address = board.address
    board.stop_sharing()
    board.stop_sharing()
    with pytest.raises(RankError, match=r"rank 0: it has ended .* its board .* is gone"):
        JobBoard.open(address)
    with pytest.raises(RankError, match="rank 0: it has ended"):
        JobBoard.open("999999999:3:17")


def test_the_first_failure_is_kept() -> None:
    """Oracle: the first text; the second one, which only reports the consequence, is absent."""
    slot = JobBoard.create(1).slots[0]
    slot.fail("the cause", failed_rank=3)
    slot.fail("the consequence")
    assert (slot.failure_text, slot.failed_rank) == ("the cause", 3)


def test_exit_codes_and_steps() -> None:
    """Oracle: every code comes back; a rank is idle only when the last step it began is done."""
    slot = JobBoard.create(1).slots[0]
    for code in (0, 1, 7, -9, -11):
        slot.note_exit(code)
        assert slot.exit_code == code
    slot.begin_step(1)
    slot.begin_step(2)
    slot.end_step(1)
    assert slot.busy_since_ns > 0
    slot.end_step(2)
    assert slot.busy_since_ns == 0 and slot.step_done == 2


@pytest.mark.parametrize("step_id", [1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40])
def test_an_echo_is_one_word(step_id: int) -> None:
    """Oracle: both low halves come back, also where the word is negative as a signed number."""
    word = echo_word(step_id, 0xABCDEF9876543210)
    assert -(1 << 63) <= word < 1 << 63
    assert split_echo(word) == (step_id & 0xFFFFFFFF, 0x76543210)


def test_process_start_tells_processes_apart() -> None:
    """Oracle: the start time of this process is stable, a later process's is not smaller, a missing one's is an
    error."""
    assert process_start(os.getpid()) == process_start(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process_start(process.pid) >= process_start(os.getpid())
        process.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        process_start(process.pid)


def test_a_step_costs_microseconds() -> None:
    """Oracle: 100 notes of a step's kind take less than 2 ms of this thread's CPU time, at most three times the
    measured."""
    slot = JobBoard.create(1).slots[0]
    progress = RankProgress()
    progress.show_on(slot.words, PHASE_WORD)

    def cost_s() -> float:
        began_s = time.thread_time()
        for step_id in range(1, 101):
            slot.note_received(step_id, 0x1234567890)
            slot.begin_step(step_id)
            progress.reach(RankPhase.STEP_BEGIN)
            for _ in range(8):
                progress.collective()
            progress.reach(RankPhase.SAMPLE)
            slot.end_step(step_id)
        return time.thread_time() - began_s

    assert min(cost_s() for _ in range(5)) < 2e-3
