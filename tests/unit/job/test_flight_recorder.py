"""The flight record: written, read back, and explained.  The boards are made by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tp_engine.job.flight_recorder.__main__ import main
from tp_engine.job.flight_recorder.analysis import explain
from tp_engine.job.flight_recorder.record import (
    FORMAT,
    BadRecordError,
    FlightRecord,
    RankRecord,
    StepRecord,
    load_record,
    save_record,
)
from tp_engine.job.flight_recorder.report import report_lines
from tp_engine.system.version import __version__

NOW_NS = 1_000_000_000_000
STEP = 812
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nRuntimeError: no kernel\n'


def ago(seconds: float) -> int:
    return NOW_NS - int(seconds * 1e9)


def step(step_id: int, done_ns: int = 0, **changes: Any) -> StepRecord:
    """A step of 4 decodes that took 1 ms; without ``done_ns`` it began 9.8 s ago and has not ended."""
    begun_ns = done_ns - 1_000_000 if done_ns else ago(9.8)
    fields = {
        "step_id": step_id, "plan_bytes": 96, "plan_checksum": 0xAB00 + step_id, "decode_rows": 4,
        "received_ns": begun_ns, "started_ns": begun_ns, "launched_ns": done_ns, "done_ns": done_ns,
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})


def rank(number: int, phase: str = "collective", **changes: Any) -> RankRecord:
    """A living rank that has been inside step 812 for 9.8 s."""
    fields = {
        "rank": number, "pid": 100 + number, "process": "alive", "state": "ready", "phase": phase,
        "count": 7, "busy_since_ns": ago(9.8), "step_started": STEP, "step_done": STEP - 1,
        "heartbeat_ns": ago(0.2), "steps": [step(STEP - 1, ago(9.9)), step(STEP)],
    }  # fmt: skip
    return RankRecord(**{**fields, **changes})


def idle(number: int, **changes: Any) -> RankRecord:
    """A living rank between steps 812 and 813."""
    steps = [step(STEP - 1, ago(9.9)), step(STEP, ago(9.8))]
    return rank(number, **{"phase": "sample", "step_done": STEP, "steps": steps, **changes})


def record(*ranks: RankRecord, cause: str = "rank 1: process 101 ended with signal 9") -> FlightRecord:
    return FlightRecord(
        format=FORMAT,
        written_at="2026-11-21T09:00:00Z",
        written_ns=NOW_NS,
        written_by="rank 0",
        created_ns=ago(20),
        cause=cause,
        culprit=1,
        world_size=len(ranks),
        versions={"tp_engine": __version__},
        config={"model": "demo", "block_size": 16},
        ranks=list(ranks),
    )


WAITING = "Ranks 0, 2 and 3 are in collective 7 of step 812, begun 9.8 s ago."


@pytest.mark.parametrize(
    ("culprit", "sentence"),
    [
        (
            rank(1, process="gone", exit="signal 9", heartbeat_ns=ago(9.7)),
            "Rank 1 does not go on: it is in collective 7 of step 812, begun 9.8 s ago, "
            "dead (signal 9), last sign of life 9.7 s ago.",
        ),
        (
            rank(1, "step_begin", process="stopped", heartbeat_ns=ago(9.6)),
            "Rank 1 has not reached it: it is in step_begin of step 812, begun 9.8 s ago, stopped, "
            "last sign of life 9.6 s ago.",
        ),
        (
            rank(1, "step_begin", heartbeat_ns=ago(9.6)),
            "Rank 1 has not reached it: it is in step_begin of step 812, begun 9.8 s ago, "
            "not running, last sign of life 9.6 s ago.",
        ),
        (
            rank(1, "step_begin"),
            "Rank 1 has not reached it: it is in step_begin of step 812, begun 9.8 s ago, running.",
        ),
        (
            rank(1, "move"),
            "Rank 1 has not reached it: it is in move of step 812, begun 9.8 s ago, running.",
        ),
        (
            rank(1, state="failed", failure=TRACEBACK, process="gone", heartbeat_ns=ago(3)),
            "Rank 1 does not go on: it is in collective 7 of step 812, begun 9.8 s ago, "
            "failed (RuntimeError: no kernel), last sign of life 3.0 s ago.",
        ),
        (
            idle(1, step_started=STEP - 1, step_done=STEP - 1, steps=[step(STEP - 1, ago(9.9))]),
            "Rank 1 has not reached it: it is between steps, step 811 done 9.9 s ago, running.",
        ),
    ],
    ids=["dead", "stopped", "silent", "stuck", "moving", "failed", "without the plan"],
)  # fmt: skip
def test_who_waits_for_whom(culprit: RankRecord, sentence: str) -> None:
    """Oracle: the sentences here, one for each way in which a rank delays the others."""
    assert explain(record(rank(0), culprit, rank(2), rank(3))) == [WAITING, sentence]


def test_the_others_may_wait_for_rank_0() -> None:
    """Oracle: rank 0 samples alone while the others are in the broadcast of the ids."""
    found = explain(record(rank(0, "sample", count=6), rank(1), rank(2)))
    assert found == [
        "Ranks 1 and 2 are in collective 7 of step 812, begun 9.8 s ago.",
        "Rank 0 has not reached it: it is in sample of step 812, begun 9.8 s ago, running.",
    ]


def test_nobody_waits_for_a_rank_that_died_idle() -> None:
    """Oracle: the sentences here."""
    found = explain(record(idle(0), idle(1, process="gone", exit="signal 9", heartbeat_ns=ago(1)), idle(2)))
    assert found == [
        "Ranks 0 and 2 are between steps, step 812 done 9.8 s ago.",
        "Rank 1 is between steps, step 812 done 9.8 s ago, dead (signal 9), last sign of life 1.0 s ago.",
    ]


def test_all_ranks_in_one_collective_accuse_the_operation() -> None:
    """Oracle: the report names no rank as the one that is behind."""
    found = explain(record(rank(0), rank(1)))
    assert found[0] == "Ranks 0 and 1 are in collective 7 of step 812, begun 9.8 s ago."
    assert len(found) == 2 and "No rank is behind" in found[1]


def test_start_up_is_explained_by_its_phases() -> None:
    """Oracle: rank 0 has loaded its part, rank 1 died while loading."""
    start = {"state": "starting", "step_started": 0, "step_done": 0, "steps": []}
    dead = rank(1, "load", process="gone", exit="exit code 1", heartbeat_ns=ago(4), count=0, **start)
    assert explain(record(rank(0, "load", count=1, **start), dead)) == [
        "Rank 0 is in load of the start-up (its own part is done), begun 20.0 s ago.",
        "Rank 1 has not reached it: it is in load of the start-up, begun 20.0 s ago, "
        "dead (exit code 1), last sign of life 4.0 s ago.",
    ]


def test_ranks_that_have_left_are_waited_for_by_nobody() -> None:
    """Oracle: rank 1 left normally, rank 2 died on its way out."""
    left = idle(1, state="left", process="gone")
    found = explain(record(idle(0), left, idle(2, state="stopping", phase="shutdown", exit="signal 11")))
    assert len(found) == 2 and "Rank 1" not in " ".join(found)
    assert found[1].startswith("Rank 2 is in shutdown, dead (signal 11)")


def test_a_diverged_plan_is_named_with_both_values() -> None:
    """Oracle: step 811 differs on rank 1; that rank's later differences follow from it and are not repeated."""
    steps = [step(810, ago(10)), step(811, ago(9.9), plan_checksum=0x77), step(812, plan_checksum=0x78)]
    good = [step(810, ago(10)), step(811, ago(9.9)), step(812)]
    found = explain(record(rank(0, steps=good), rank(1, steps=steps), rank(2, steps=good)))
    assert found[0] == "Rank 1 received another plan than rank 0 in step 811: 0x77, rank 0 has 0xae2b."
    assert sum("another plan" in line for line in found) == 1


def test_diverged_inputs_are_named_with_both_values() -> None:
    """Oracle: equal plans, but different digests of the inputs in step 812."""
    others = [step(811, ago(9.9), input_digest=5), step(812, input_digest=6)]
    found = explain(record(rank(0, steps=[others[0], step(812, input_digest=7)]), rank(1, steps=others)))
    assert found[0] == "Rank 1 made other inputs of the plan than rank 0 in step 812: 0x6, rank 0 has 0x7."


def test_a_rank_that_is_a_collective_behind_is_named() -> None:
    """Oracle: rank 1 entered one collective less in the same step."""
    found = explain(record(rank(0), rank(1, count=6)))
    assert found[1] == "Rank 1 has not reached it: it is in collective 6 of step 812, begun 9.8 s ago, running."


def test_a_rank_that_failed_because_of_another_was_waiting() -> None:
    """Oracle: rank 0's collective raised when rank 1 died; rank 0 blames it."""
    victim = rank(0, state="failed", failure="Connection closed by peer", failed_rank=1)
    found = explain(record(victim, rank(1, "step_begin", process="gone", exit="signal 9")))
    assert found[0] == "Rank 0 is in collective 7 of step 812, begun 9.8 s ago."
    assert found[1].startswith("Rank 1 has not reached it") and "dead (signal 9)" in found[1]


def test_a_rank_that_never_came_is_named() -> None:
    """Oracle: an empty slot of the board."""
    start = {"state": "starting", "step_started": 0, "step_done": 0, "steps": []}
    absent = RankRecord(rank=1, process="none", state="absent", phase="none")
    found = explain(record(rank(0, "group_init", count=0, **start), absent))
    assert found == ["Rank 0 is in group_init of the start-up, begun 20.0 s ago.", "Rank 1 never came."]


def test_a_step_that_was_never_sent_is_named() -> None:
    """Oracle: rank 1 runs step 813, rank 0 has sent 812."""
    found = explain(record(rank(0), rank(1, step_started=813, steps=[step(813)])))
    assert "Rank 1 has step 813, but step 812 is the last that rank 0 sent." in found


def test_the_report_has_cause_ranks_traceback_and_times() -> None:
    """Oracle: one line of each table, computed by hand: 2 ms of waiting, 1 ms of work, 0.5 ms between the ranks."""
    begun_ns = ago(1)

    def ran(skew_ns: int) -> list[StepRecord]:
        first = step(10, begun_ns + skew_ns)
        received_ns = begun_ns + skew_ns + 2_000_000
        return [first, step(11, received_ns + 1_000_000, received_ns=received_ns, started_ns=received_ns)]

    failed = idle(1, steps=ran(500_000), state="failed", failure=TRACEBACK, step_done=11, cpu_ns=int(3e9))
    text = report_lines(record(idle(0, steps=ran(0), step_done=11), failed), num_steps=1)
    assert text[0] == "Cause: rank 1: process 101 ended with signal 9"
    ranks = next(line for line in text if line.split()[:3] == ["1", "101", "failed"])
    assert " ".join(ranks.split()) == "1 101 failed sample 812 11 0.2 s ago 3.0 s alive"
    assert "    RuntimeError: no kernel" in text
    rows = [line.split() for line in text if line.split()[:1] == ["11"]]
    assert rows == [
        ["11", "0", "-998.0", "4", "0", "96", "2.000", "1.000", "1.000", "0.500"],
        ["11", "1", "-997.5", "4", "0", "96", "2.000", "1.000", "1.000"],
    ]
    assert not any(line.split()[:1] == ["10"] for line in text), "one step was asked for"


def test_a_plan_sent_ahead_costs_no_waiting() -> None:
    """Oracle: step 11's plan came while step 10 ran; step 12 never began."""
    early = step(11, ago(0.9), received_ns=ago(1.1), started_ns=ago(1))
    unseen = step(12, received_ns=ago(0.8), started_ns=0, launched_ns=0)
    text = report_lines(record(idle(0, steps=[step(10, ago(1)), early, unseen])), num_steps=2)
    rows = [line.split() for line in text if line.split()[:1] in (["11"], ["12"])]
    assert rows[0][6] == "0.000" and rows[1][2] == "never" and rows[1][7:] == ["-", "-", "unfinished"]


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    """Oracle: the record itself; the file is private, complete, and the only one."""
    written = record(rank(0), rank(1))
    path = save_record(written, str(tmp_path / "new folder"))
    assert path is not None and path.name.startswith("tp_engine-flight-") and path.stat().st_mode & 0o777 == 0o600
    assert load_record(path) == written
    again = save_record(written, str(path.parent))
    assert again is not None and sorted(path.parent.iterdir()) == sorted([path, again])


def test_writing_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a folder that cannot be made gives a warning; an empty name turns the record off."""
    (tmp_path / "file").write_text("")
    assert save_record(record(rank(0)), str(tmp_path / "file" / "below")) is None
    assert "could not be written" in caplog.text
    caplog.clear()
    assert save_record(record(rank(0)), "") is None and not caplog.text


def test_a_folder_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a file system that never answers costs no more than the patience set here."""
    monkeypatch.setattr("tp_engine.job.flight_recorder.record._PATIENCE_S", 0.05)
    monkeypatch.setattr("tp_engine.job.flight_recorder.record._write", lambda *_: time.sleep(30))
    began_s = time.monotonic()
    assert save_record(record(rank(0)), str(tmp_path)) is None
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", "no flight record"),
        (b"{}", "missing required field"),
        (b"[1]", "no flight record"),
        (b'{"format": 99}', "has format 99, this version of tp_engine reads 1"),
        (msgspec.json.encode(msgspec.structs.replace(record(rank(0)), world_size=2)), "world size is 2"),
        (msgspec.json.encode(record(rank(0)))[:-20], "no flight record"),
    ],
)
def test_a_bad_file_is_a_clear_error(
    tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: exit code 2 and one line that names the file and the fault."""
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BadRecordError):
        load_record(path)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}") and words in error and error.count("\n") == 1


def test_the_command_prints_a_record(tmp_path: Path) -> None:
    """Oracle: the report; a file that does not exist is exit code 2."""
    path = save_record(record(rank(0), rank(1)), str(tmp_path))
    command = [sys.executable, "-m", "tp_engine.job.flight_recorder"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and "Ranks 0 and 1 are in collective 7 of step 812" in done.stdout
    missing = subprocess.run([*command, str(tmp_path / "none.json")], capture_output=True, text=True)
    assert missing.returncode == 2 and "cannot be read: No such file" in missing.stderr and not missing.stdout
