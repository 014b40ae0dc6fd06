"""What happened in step N: the example of docs/what_happened.md, and what else may stand out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.job.test_flight_recorder import record
from tp_engine.cli.main import main
from tp_engine.job.flight_recorder.record import FlightRecord, RankRecord, StepRecord
from tp_engine.job.flight_recorder.steps import slowest_lines, step_lines

PAGE = Path(__file__).parents[3] / "docs" / "what_happened.md"
MS = 1_000_000


def step(step_id: int, free: int, *, starts: int = 0, runs: int = 1_500_000, **changes: Any) -> StepRecord:
    """A step of 4 decodes, whose plan comes 0.1 ms after the end of the one before, and which ends 0.5 ms after the
    run."""
    received = free + MS // 10
    begun = received + starts
    fields = {
        "step_id": step_id, "plan_bytes": 96, "decode_rows": 4, "received_ns": received, "started_ns": begun,
        "launched_ns": begun + runs, "done_ns": begun + runs + MS // 2,
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})


def two_ranks(last: list[StepRecord]) -> FlightRecord:
    """Eleven equal steps, then these of ranks 0 and 1."""
    before, free = [], 1000 * MS
    for number in range(801, 812):
        before.append(step(number, free))
        free = before[-1].done_ns
    return record(
        *(
            RankRecord(rank=rank, pid=100 + rank, process="alive", state="ready", phase="sample", steps=[*before, one])
            for rank, one in enumerate(last)
        )
    )


FREE = 1000 * MS + 11 * (2 * MS + MS // 10)
LATE = two_ranks([step(812, FREE, runs=410 * MS + MS // 2), step(812, FREE, starts=409 * MS)])


def test_the_example_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the page, letter by letter; the record is one of a rank that begins step 812 late by 409 ms."""
    file = tmp_path / "record.json"
    file.write_bytes(msgspec.json.encode(LATE))
    examples = re.findall(r"```text\n\$ tp-engine steps record.json (.*)\n([^`]*)```", PAGE.read_text(encoding="utf-8"))
    assert [options for options, _ in examples] == ["--slowest 3", "--step 812"]
    for options, expected in examples:
        assert main(["steps", str(file), *options.split()]) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ([step(812, FREE), step(812, FREE)], "Nothing stands out."),
        ([step(812, FREE, runs=60 * MS)] * 2, "Rank 0 took 30.0 times as long as usual to run it."),
        (
            [step(812, FREE, received_ns=FREE + 50 * MS, started_ns=FREE + 50 * MS, launched_ns=FREE + 51 * MS,
                  done_ns=FREE + 52 * MS)] * 2,
            "All ranks waited for the plan: there was nothing to run, or rank 0 was late with it.",
        ),
        ([step(812, FREE), step(812, FREE, done_ns=0)], "It has not ended on rank 1."),
        ([step(812, FREE), step(812, FREE, launched_ns=0, done_ns=0)], "It has not ended on rank 1."),
    ],
)  # fmt: skip
def test_what_stands_out(last: list[StepRecord], said: str) -> None:
    """Oracle: by hand."""
    assert said in step_lines(two_ranks(last), 812)


def test_steps_that_are_not_there() -> None:
    """Oracle: the recorded range; a job of which no step has ended, and one without steps."""
    assert step_lines(LATE, 9) == ["Step 9 is not recorded; those from 801 to 812 are."]
    nothing = record(RankRecord(rank=0, pid=1, process="alive", state="ready", phase="load"))
    assert step_lines(nothing, 1) == ["No steps are recorded."] and slowest_lines(nothing, 3) == ["No step has ended."]
    begun = record(
        RankRecord(rank=0, pid=1, process="alive", state="ready", phase="load", steps=[StepRecord(step_id=1)])
    )
    assert "It has not ended on rank 0." in step_lines(begun, 1)
