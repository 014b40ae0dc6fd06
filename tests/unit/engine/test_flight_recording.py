"""From a real board to a record: the recorder notes the steps, the kernel reports the processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tp_engine.config import EngineConfig
from tp_engine.engine.incident import FlightRecorder, process_state, read_board
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import NUM_RECORDS, PHASE_WORD, State, StepRecorder, process_start
from tp_engine.job.flight_recorder.record import FlightRecord, load_record
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.plan import StepPlan


def plan(step_id: int) -> StepPlan:
    """Two decodes and a prompt of seven tokens in two chunks."""
    rows = np.arange(2, dtype=np.int32)
    return StepPlan(step_id=step_id, decode_rows=rows, prefill_rows=rows + 2, prefill_tokens=rows + 3)


def run_step(recorder: StepRecorder, step_id: int) -> None:
    recorder.received(plan(step_id), 100 + step_id, (1 << 63) + step_id)
    recorder.begin(step_id)
    recorder.launched(step_id)
    recorder.done(step_id)


def read(board: JobBoard) -> FlightRecord:
    return read_board(board, EngineConfig(), cause="a test", culprit=1, writer="rank 0")


def test_a_board_becomes_a_record() -> None:
    """Oracle: the values that the test wrote to the board."""
    board = JobBoard.create(2)
    slot = board.slots[0]
    slot.register()
    slot.state = State.READY
    progress, recorder = RankProgress(), StepRecorder(slot)
    progress.show_on(slot.words, PHASE_WORD)
    began_ns = time.monotonic_ns()
    run_step(recorder, 1)
    slot.note_inputs(1, 0xBEEF)
    slot.begin_step(2)
    progress.reach(RankPhase.STEP_BEGIN)
    progress.collective()
    board.slots[1].note_exit(-9)
    record = read(board)
    mine, other = record.ranks
    assert (mine.pid, mine.process, mine.state) == (os.getpid(), "alive", "ready")
    assert (mine.phase, mine.count, mine.exit) == ("collective", 1, None)
    assert (mine.step_received, mine.step_started, mine.step_done) == (1, 2, 1) and mine.busy_since_ns > 0
    (step,) = mine.steps
    assert (step.step_id, step.plan_bytes, step.decode_rows, step.prefill_tokens) == (1, 101, 2, 7)
    assert (step.plan_checksum, step.input_digest) == ((1 << 63) + 1, 0xBEEF)
    assert began_ns < step.received_ns < step.started_ns < step.launched_ns < step.done_ns < record.written_ns
    assert (other.process, other.state, other.exit, other.steps) == ("none", "absent", "signal 9", [])
    assert record.world_size == 2 and record.config["block_size"] == 16 and record.versions["tp_engine"]


@pytest.mark.parametrize("num_steps", [0, 1, NUM_RECORDS, NUM_RECORDS + 1, 3 * NUM_RECORDS + 5])
def test_the_last_steps_are_kept_in_order(num_steps: int) -> None:
    """Oracle: the ids of the last 512 steps."""
    board = JobBoard.create(1)
    recorder = StepRecorder(board.slots[0])
    for step_id in range(1, num_steps + 1):
        run_step(recorder, step_id)
    found = [step.step_id for step in read(board).ranks[0].steps]
    assert found == list(range(max(1, num_steps - NUM_RECORDS + 1), num_steps + 1))


def test_a_step_that_has_only_begun_has_no_later_times() -> None:
    """Oracle: zeros, although the board's row held the times of a step 512 earlier."""
    board = JobBoard.create(1)
    recorder = StepRecorder(board.slots[0])
    run_step(recorder, 3)
    recorder.received(plan(3 + NUM_RECORDS), 1, 1)
    recorder.begin(3 + NUM_RECORDS)
    (step,) = read(board).ranks[0].steps
    assert step.step_id == 3 + NUM_RECORDS and step.started_ns > 0 and step.launched_ns == step.done_ns == 0


def test_recording_a_step_costs_microseconds() -> None:
    """Oracle: 1000 steps take less than 10 ms of this thread's CPU time, several times the measured time."""
    recorder = StepRecorder(JobBoard.create(1).slots[0])
    one = plan(1)

    def cost_s() -> float:
        began_s = time.thread_time()
        for step_id in range(1000):
            recorder.received(one, 100, 1)
            recorder.begin(step_id)
            recorder.launched(step_id)
            recorder.done(step_id)
        return time.thread_time() - began_s

    assert min(cost_s() for _ in range(5)) < 10e-3


def test_processes_are_seen_as_they_are() -> None:
    """Oracle: the signals sent to a child; a pid with another start time is another process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started_ticks = process_start(child.pid)
        assert process_state(child.pid, started_ticks) == "alive"
        assert process_state(child.pid, started_ticks + 1) == "gone"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_state(child.pid, started_ticks) == "stopped"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid, started_ticks) == "gone"  # a zombie
    assert process_state(child.pid, started_ticks) == "gone"
    assert process_state(0, 0) == "none"


def test_one_engine_leaves_one_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the first cause; the log has the command that reads the record."""
    board = JobBoard.create(1)
    recorder = FlightRecorder(board, EngineConfig(flight_recorder_dir=str(tmp_path)), writer="rank 0")
    path = recorder.write("the cause", 1)
    assert path is not None and recorder.write("the consequence", 0) == path
    assert list(tmp_path.iterdir()) == [path]
    record = load_record(path)
    assert (record.cause, record.culprit, record.written_by) == ("the cause", 1, "rank 0")
    assert f"python -m tp_engine.job.flight_recorder {path}" in caplog.text


def test_no_record_is_written_where_none_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: no path, and no line in the log."""
    recorder = FlightRecorder(JobBoard.create(1), EngineConfig(flight_recorder_dir=""), writer="rank 0")
    assert recorder.write("the cause") is None and not caplog.text


def test_a_broken_board_does_not_hide_the_cause(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Oracle: a state that does not exist gives a warning, and the job's end proceeds."""
    board = JobBoard.create(1)
    board.slots[0].words[8] = 99
    recorder = FlightRecorder(board, EngineConfig(flight_recorder_dir=str(tmp_path)), writer="rank 0")
    assert recorder.write("the cause") is None
    assert "could not be made: ValueError" in caplog.text
