"""``tp-engine tune``: its summary, its report, its file and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.worker.tuning.test_start import found
from tp_engine.cli.main import main
from tp_engine.worker.tuning import start
from tp_engine.worker.tuning.table import RIGHT, Tried, TunedTable, read_pinned


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> TunedTable:
    """What the command finds: one shape, two timed candidates and a wrong one."""
    made = found()
    one = made.shapes[0]
    tried = (
        Tried(candidate="onednn", verdict=RIGHT, error=0.5, microseconds={1: 30.0, 64: 55.0}, ratios={1: 1.0, 64: 1.0}),
        Tried(candidate="panels", verdict=RIGHT, error=0.2, microseconds={1: 10.0, 64: 50.0}, ratios={1: 0.3333}),
        Tried(candidate="tiles", verdict="it ended its process, code -11", is_fault=True),
    )
    made = msgspec.structs.replace(
        made, shapes=(msgspec.structs.replace(one, tried=tried, count=30),), date="2026-11-29"
    )
    asked: dict[str, Any] = {}

    def find(_device: Any, wanted: Any, extent: str, *, again: bool) -> TunedTable:
        asked.update(extent=extent, again=again, wanted=wanted)
        return made if not asked["again"] else msgspec.structs.replace(made, shapes=())

    monkeypatch.setattr(start, "find_table", find)
    return made


def test_summary_and_file(table: TunedTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: by hand; exit code 3, because a candidate crashed."""
    path = tmp_path / "tuned.json"
    assert main(["tune", "--device", "cpu", "--quantization", "int8", "--to", str(path)]) == 3
    lines = capsys.readouterr().out.splitlines()
    key = "int8_linear in=64 out=32 type=bfloat16"
    assert lines == [
        f"{key}: panels; the code's own choice is panels to 4 rows, onednn above",
        f"{key}: tiles it ended its process, code -11",
    ]
    assert read_pinned(str(path)) == table


def test_report(table: TunedTable, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: by hand; a column for each number of rows."""
    assert main(["tune", "--device", "cpu", "--quantization", "int8", "--report"]) == 3
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rows", "1", "64"] in lines
    assert ["onednn", "30.0", "(1.00)", "55.0", "(1.00)", "right,", "error", "0.50"] in lines
    assert ["panels", "10.0", "(0.33)", "50.0", "right,", "error", "0.20"] in lines
    assert ["tiles", "-", "-", "it", "ended", "its", "process,", "code", "-11"] in lines


def test_nothing_to_choose(table: TunedTable, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit code 0 and a sentence; --again tries anew."""
    assert main(["tune", "--device", "cpu", "--again"]) == 0
    assert "no product with several kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune", "quick"], "tune is for engines; this command tries kernels"),
        (["--to", "/no/such/folder/file"], "to is '/no/such/folder/file', whose folder does not exist"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: value, rule and remedy; exit code 2."""
    assert main(["tune", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
