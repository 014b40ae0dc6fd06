"""Stop signals, in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

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

IMPORTING = """
import sys
from tp_engine.server.signals import StopRequested, StopSignals
try:
    with StopSignals() as signals, signals.raising(lambda: print("last", flush=True)):
        import slow_module
except StopRequested:
    print("raised", flush=True)
"""
SLOW_MODULE = """
import time
print("ready", flush=True)
for _ in range(3000):
    time.sleep(0.01)
"""
IN_A_FINALIZER = """
import time
from tp_engine.server import signals as stop
stop.UNINTERRUPTIBLE_S = 0.2

class Slow:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(30)

with stop.StopSignals() as signals, signals.raising(lambda: print("last", flush=True)):
    Slow()
    time.sleep(30)
"""
ENDING = """
import sys
import time
from tp_engine.server.signals import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.received:
        time.sleep(0.01)
print("stopped", flush=True)
time.sleep(1)
"""


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.read().split()


def start(script: str, path: Path = ROOT) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_starting_process_stops_at_the_first_signal(number: signal.Signals) -> None:
    """Oracle: the exception reaches the main thread, well before its wait is over."""
    with start(STARTING) as process:
        process.send_signal(number)
        assert lines_of(process) == ["stopped"]
        assert process.wait(30) == 0


def test_a_running_process_tells_the_first_from_the_second() -> None:
    """Oracle: one callback per signal, in order."""
    with start(RUNNING) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGTERM)
        assert lines_of(process) == ["second", "restored"]
        assert process.wait(30) == 0


def test_a_process_stuck_outside_the_interpreter_ends_too() -> None:
    """Oracle: the end within seconds, although no exception can be raised."""
    with start(STUCK) as process:
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
        assert time.monotonic() - began_s < 20


def test_nothing_is_raised_within_an_import(tmp_path: Path) -> None:
    """Oracle: the last act, then exit code 0: libraries in C++ abort if one of their imports raises."""
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    with start(IMPORTING, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert lines_of(process) == ["last"]
        assert process.wait(30) == 0


def test_a_stop_that_a_finalizer_swallows_leaves_no_traceback() -> None:
    """Oracle: only the last act, on standard output and error; exit code 0."""
    with start(IN_A_FINALIZER) as process:
        process.send_signal(signal.SIGINT)
        assert lines_of(process) == ["last"]
        assert process.wait(30) == 0


def test_signals_after_the_stop_change_nothing() -> None:
    """Oracle: exit code 0 and no further output, whichever signals arrive while the interpreter ends."""
    with start(ENDING) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert lines_of(process) == []
        assert process.wait(30) == 0
