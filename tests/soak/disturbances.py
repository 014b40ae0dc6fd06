"""Disturbances of a running engine: pauses and sleeps of random ranks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter

import psutil

LONGEST_PAUSE_S = 0.4


class Pauses:
    """Within the block, stops a random rank for a moment, again and again; hold ``lock`` to prevent pauses.

    Rank 0 is this process; a shell stops it and wakes it up.
    """

    def __init__(self, ranks: list[psutil.Process], rng: random.Random) -> None:
        self.count: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._ranks = ranks
        self._rng = rng
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pauses", daemon=True)

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._rng.uniform(0.2, 1.2)):
            with self.lock:
                number, pause_s = self._rng.randrange(len(self._ranks) + 1), self._rng.uniform(0.01, LONGEST_PAUSE_S)
                _pause_this_process(pause_s) if number == 0 else _pause(self._ranks[number - 1], pause_s)
                self.count[f"rank {number} stopped"] += 1


def _pause(process: psutil.Process, pause_s: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(pause_s)
        finally:
            process.send_signal(signal.SIGCONT)


def _pause_this_process(pause_s: float) -> None:
    pid = os.getpid()
    subprocess.run(["/bin/sh", "-c", f"kill -STOP {pid}; sleep {pause_s:.3f}; kill -CONT {pid}"], check=True)


def random_sleeps(num_ranks: int, rng: random.Random, *, most_steps: int) -> str:
    """A value of TP_ENGINE_FAULT: sleeps at random moments of random ranks, spread over ``most_steps`` steps."""
    faults = []
    for _ in range(12):
        phase = rng.choice(("step_begin", "move", "collective", "sample"))
        moment = rng.randint(20, most_steps)
        faults.append(f"{rng.randrange(num_ranks)}:{phase}@{moment}:sleep={rng.uniform(0.01, LONGEST_PAUSE_S):.3f}")
    return ",".join(faults)
