"""Stop signals, in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

STARTING = """
import time
from tp_engine.server.signals import StopRequested, StopSignals
with StopSignals() as signals:
    try:
        with signals.raising():
            print("ready", flush=True)
            time.sleep(30)
    except StopRequested:
        print("stopped", flush=True)
"""
RUNNING = """
import threading
from tp_engine.server.signals import StopSignals
second = threading.Event()
with StopSignals() as signals:
    signals.on_stop(lambda: print("first", flush=True), lambda: (print("second", flush=True), second.set()))
    print("ready", flush=True)
    second.wait(30)
print("restored", flush=True)
"""
STUCK = """
import ctypes
from tp_engine.server import signals as stop
stop.UNINTERRUPTIBLE_S = 0.2
mutex = ctypes.create_string_buffer(128)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
with stop.StopSignals() as signals, signals.raising():
    try:
        print("ready", flush=True)
        lock(mutex)  # never returns, and no signal interrupts it
    except stop.StopRequested:  # the signal came first
        lock(mutex)
"""


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.read().split()


def start(script: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_starting_process_stops_at_the_first_signal(number: signal.Signals) -> None:
    """Oracle: the exception reaches the main thread, well before its wait is over."""
    with start(STARTING) as process:
        process.send_signal(number)
        assert lines_of(process) == ["stopped"]
        assert process.wait(5) == 0


def test_a_running_process_tells_the_first_from_the_second() -> None:
    """Oracle: one callback per signal, in order."""
    with start(RUNNING) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGTERM)
        assert lines_of(process) == ["second", "restored"]
        assert process.wait(5) == 0


def test_a_process_stuck_outside_the_interpreter_ends_too() -> None:
    """Oracle: the end within seconds, although no exception can be raised."""
    with start(STUCK) as process:
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began_s < 5
