"""Spinning after a call.  Oracle: the rule, with a clock of our own."""

from __future__ import annotations

import pytest

from tp_engine.ipc import ring_buffer
from tp_engine.ipc.ring_buffer import CallSpin

SPIN_S = 300e-6


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ring_buffer, "time", clock)
    return clock


def called(spin: CallSpin, clock: Clock, *, after_s: float) -> float:
    """A call, and its message ``after_s`` later; returns how long the reader may spin."""
    spin_s = spin.begin()
    clock.now_s += after_s
    spin.end()
    return spin_s


def num_skipped(spin: CallSpin, clock: Clock) -> int:
    """The number of calls without a spin before the next spin, whose message is late."""
    count = 0
    while called(spin, clock, after_s=0.001) == 0.0:
        count += 1
    return count


def test_spins_while_messages_come_in_time(clock: Clock) -> None:
    """Oracle: every call has a spin."""
    spin = CallSpin()
    assert [called(spin, clock, after_s=0.0002) for _ in range(5)] == [SPIN_S] * 5


def test_skips_ever_more_calls_while_spins_are_in_vain(clock: Clock) -> None:
    """Oracle: 16 calls after the first late message, twice as many after each further one, at most 4096; then 16 again
    after a spin that paid."""
    spin = CallSpin()
    assert called(spin, clock, after_s=0.001) == SPIN_S
    assert [num_skipped(spin, clock) for _ in range(10)] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]
    assert [called(spin, clock, after_s=0.0001) for _ in range(4097)] == [0.0] * 4096 + [SPIN_S]
    assert called(spin, clock, after_s=0.001) == SPIN_S and num_skipped(spin, clock) == 16


def test_a_call_for_nothing_is_not_counted(clock: Clock) -> None:
    """Oracle: the next calls spin: the engine was idle between a call and its message."""
    spin = CallSpin()
    assert [called(spin, clock, after_s=0.1) for _ in range(3)] == [SPIN_S] * 3


def test_messages_without_a_call_change_nothing(clock: Clock) -> None:
    """Oracle: the next call spins, however late the messages come."""
    spin = CallSpin()
    for _ in range(3):
        clock.now_s += 1.0
        spin.end()
    assert called(spin, clock, after_s=0.0) == SPIN_S


def test_several_calls_before_one_message(clock: Clock) -> None:
    """Oracle: each call begins the spin anew, so the time since the last call counts."""
    spin = CallSpin()
    for _ in range(3):
        assert spin.begin() == SPIN_S
        clock.now_s += 0.0002
    spin.end()
    assert called(spin, clock, after_s=0.0) == SPIN_S
