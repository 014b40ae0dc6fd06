"""Reader processes of the control-plane benchmark, and the loop that measures every contender.

This module imports the standard library only, because it also runs under another engine's interpreter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol

TIMEOUT_S = 120.0
REALTIME_SHARE = 0.25

Receive = Callable[[], object]


def read_messages(open_channel: Callable[..., Receive], arguments: tuple[Any, ...], stamps: Any, pipe: Any) -> None:
    """A reader's main loop: read and decode as many messages as it is told to, and note the time of each."""
    receive = open_channel(*arguments)
    index = arguments[-1]
    pipe.send("ready")
    while True:
        count, realtime = pipe.recv()
        with undisturbed(realtime, rank=index + 1):
            for _ in range(count):
                receive()
                stamps[index] = time.monotonic_ns()


@contextmanager
def undisturbed(realtime: bool, *, rank: int) -> Iterator[None]:
    """If ``realtime``, run with real-time priority; rank 0 gets a core that readers do not use."""
    if not realtime:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setaffinity(0, {cores[0] if rank == 0 or len(cores) == 1 else cores[1 + (rank - 1) % (len(cores) - 1)]})
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)


def allows_realtime() -> bool:
    """Whether this process may ask for real-time priority, which takes root and a kernel that grants it."""
    try:
        with undisturbed(True, rank=0):
            return True
    except PermissionError:
        return False


class Readers:
    """``count`` processes.  Between two ``expect`` calls they wait at a pipe and take no time from other contenders.

    ``open_channel(*arguments, index)`` runs in each and gives the function that receives and decodes one message.
    """

    def __init__(
        self, context: BaseContext, count: int, open_channel: Callable[..., Receive], arguments: tuple[Any, ...]
    ) -> None:
        self._stamps: Sequence[int] = RawArray("q", count)
        self._pipes = []
        self._processes = []
        for index in range(count):
            ours, theirs = context.Pipe()
            target_arguments = (open_channel, (*arguments, index), self._stamps, theirs)
            process = context.Process(target=read_messages, args=target_arguments, daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_ready(self) -> None:
        """Wait until every reader has opened the channel."""
        for pipe in self._pipes:
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"a reader did not start within {TIMEOUT_S:g} s")
            pipe.recv()

    def expect(self, num_messages: int, realtime: bool) -> None:
        """Let every reader read this many messages."""
        for pipe in self._pipes:
            pipe.send((num_messages, realtime))

    def last_since(self, start_ns: int) -> int:
        """Wait until all readers have decoded the message published at ``start_ns``; returns the time of the last."""
        deadline_ns = start_ns + int(TIMEOUT_S * 1e9)
        while min(self._stamps) < start_ns:
            if time.monotonic_ns() > deadline_ns:
                raise TimeoutError(f"a reader did not read within {TIMEOUT_S:g} s")
            time.sleep(0)
        return max(self._stamps)

    def close(self) -> None:
        """End the readers.  They wait at their pipes, unless a contender has failed."""
        for process in self._processes:
            process.terminate()
            process.join()


class Contender(Protocol):
    """One control plane.  A step goes through all methods in this order."""

    readers: Readers

    def draw(self) -> None:
        """Before a mixed step: draw 32 prompts of 512 tokens; not timed."""

    def admit(self) -> None:
        """Queue the drawn prompts as requests."""

    def schedule(self) -> object:
        """Decide what to run; returns the step."""

    def publish(self, step: Any) -> None:
        """Encode the step and send it."""

    def encode(self, step: Any) -> bytes | bytearray:
        """Encode the step once more, to time encoding alone."""

    def decode(self, data: Any) -> None:
        """Decode the message once more, to time decoding alone."""

    def sample(self, step: Any) -> Any:
        """Random tokens, one for each row that samples; not timed."""

    def update(self, step: Any, tokens: Any) -> object:
        """Append the step's tokens, check stops, publish blocks to the prefix cache; returns the caller's results."""

    def retire(self) -> None:
        """After a mixed step: end its 32 requests; not timed."""


@dataclass
class Times:
    """Microseconds of each phase, and bytes of each message."""

    phases: dict[str, list[float]] = field(default_factory=dict)
    num_bytes: list[int] = field(default_factory=list)

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Call, and record the time under ``name``."""
        start_ns = time.monotonic_ns()
        value = call()
        self.add(name, time.monotonic_ns() - start_ns)
        return value

    def add(self, name: str, nanoseconds: int) -> None:
        """Record one time of a phase."""
        self.phases.setdefault(name, []).append(nanoseconds / 1000)


@dataclass(frozen=True)
class Turn:
    """``num_steps`` steps of one kind.

    After publishing, rank 0 is busy for ``step_us``, as if it ran the step on its own device.  ``realtime`` is for a
    machine with other users: the processes run with real-time priority, then pause to let other processes run.
    """

    num_steps: int
    mixed: bool
    step_us: float
    realtime: bool


def run_steps(contender: Contender, times: Times, turn: Turn) -> None:
    """Measure one contender's turn."""
    # After each mixed step one step is not measured, because it carries the released rows.
    contender.readers.expect(2 * turn.num_steps if turn.mixed else turn.num_steps, turn.realtime)
    began_s = time.monotonic()
    with undisturbed(turn.realtime, rank=0):
        for _ in range(turn.num_steps):
            if turn.mixed:
                contender.draw()
                times.run("admit", contender.admit)
            _run_step(contender, times, turn.step_us)
            if turn.mixed:
                contender.retire()
                _run_step(contender, Times(), turn.step_us)
    if turn.realtime:
        time.sleep((time.monotonic() - began_s) * (1 / REALTIME_SHARE - 1))


def _run_step(contender: Contender, times: Times, step_us: float) -> None:
    step = times.run("schedule", contender.schedule)
    start_ns = time.monotonic_ns()
    contender.publish(step)
    times.add("publish", time.monotonic_ns() - start_ns)
    end_ns = start_ns + int(step_us * 1000)
    while time.monotonic_ns() < end_ns:
        pass
    times.add("publish_to_decoded", contender.readers.last_since(start_ns) - start_ns)
    data = times.run("encode", lambda: contender.encode(step))
    times.run("decode", lambda: contender.decode(data))
    times.num_bytes.append(len(data))
    tokens = contender.sample(step)
    times.run("update", lambda: contender.update(step, tokens))
