"""What the process of rank 0 is told by the program that starts it."""

from __future__ import annotations

import logging

import pytest

from tp_engine.engine.service_process import _log_level


@pytest.mark.parametrize(
    ("root", "own", "asked", "level"),
    [
        (logging.WARNING, logging.NOTSET, None, "WARNING"),
        (logging.DEBUG, logging.NOTSET, None, "DEBUG"),
        (logging.DEBUG, logging.ERROR, None, "ERROR"),
        (logging.WARNING, logging.INFO, None, "INFO"),
        (logging.WARNING, logging.NOTSET, "DEBUG", "DEBUG"),
    ],
)
def test_ranks_log_what_the_program_lets_the_library_log(
    root: int, own: int, asked: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the levels of logging, the nearest first; the variable above all."""
    monkeypatch.setattr(logging.getLogger(), "level", root)
    monkeypatch.setattr(logging.getLogger("tp_engine"), "level", own)
    monkeypatch.delenv("TP_ENGINE_LOG_LEVEL", raising=False)
    if asked is not None:
        monkeypatch.setenv("TP_ENGINE_LOG_LEVEL", asked)
    assert _log_level() == level
