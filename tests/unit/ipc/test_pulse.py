"""Rank 0's sign of life for a process that is not a rank."""

from __future__ import annotations

import time

import pytest

from tp_engine.ipc.pulse import Pulse

SECOND = 1_000_000_000


def test_the_pulse_tells_silence_and_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a clock of the test's own."""
    pulse = Pulse.create()
    reader = Pulse.open(pulse.address)
    assert reader.trouble() is None and reader.silence_s() == 0.0
    pulse.beat(hangs=False)
    assert reader.trouble() is None
    pulse.beat(hangs=True)
    assert reader.trouble() == "the engine hangs"
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + 7 * SECOND)
    assert "no sign of life for 7 s" in str(reader.trouble())
    pulse.stop_sharing()
