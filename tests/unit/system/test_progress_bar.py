"""Bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tp_engine.job import shown_progress
from tp_engine.job.progress import Progress, tell_progress
from tp_engine.system.log import configure_logging, get_logger
from tp_engine.system.progress_bar import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: whole lines, and nothing that moves a cursor; nothing at all if the work ends before a line is due."""
    silent = io.StringIO()
    monkeypatch.setattr(sys, "stderr", silent)
    said: list[str] = []
    for period_s in (0.0, 60.0):
        bar = progress_bar("lines", total=4, unit="line", say=said.append, period_s=period_s, leave=False)
        for _ in range(4):
            bar.update(1)
        bar.close()
    assert said[0].startswith("lines: 0 of 4 (0 %)") and said[-1].startswith("lines: 4 of 4 (100 %)")
    assert all(one.isprintable() for one in said) and len(said) == 5
    assert silent.getvalue() == ""


def test_a_start_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a bar for what can be counted, which is gone when the next phase begins; log lines stand on lines of
    their own."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(shown_progress, "_DELAY_S", 0.0)
    configure_logging("rank 0")
    with shown_progress.shown_progress():
        tell_progress("loading weights")
        tell_progress("loading weights", 1, 2, "tensors")
        get_logger("tp_engine.test").warning("half")
        tell_progress("loading weights", 2, 2, "tensors")
        tell_progress("packing weights")
    text = screen.getvalue()
    assert "| 1/2 [" in text
    [line] = [part for part in text.replace("\r", "\n").split("\n") if "half" in part]
    assert line.endswith("WARNING [rank 0] half")
    assert text.replace("\r", "\n").split("\n")[-1].strip() == ""


def test_a_start_without_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a phase of some milliseconds logs nothing."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, logger="tp_engine"), shown_progress.shown_progress():
        for done in range(1, 40):
            tell_progress("loading weights", done, 39, "tensors")
        tell_progress("compiling kernels", 3, unit="are ready")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (Progress("loading weights"), "loading weights"),
        (Progress("compiling kernels", 3, unit="are ready"), "compiling kernels: 3 are ready"),
        (Progress("compiling the CPU kernels", 3, 17, "files"), "compiling the CPU kernels: 3 of 17 files"),
    ],
)
def test_in_words(told: Progress, text: str) -> None:
    """Oracle: by hand; what /health answers."""
    assert str(told) == text
