"""Parents and children: every rank ends with its parent, and a parent kills only the processes that it started."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tp_engine.engine.incident import describe_exit
from tp_engine.engine.peers import ProcessHandle
from tp_engine.errors import RankError
from tp_engine.ipc.rank_slot import process_vitals
from tp_engine.system import env
from tp_engine.system.child_process import start_child

_LOOK_S = 0.5
_WORKS = 0.05  # the share of a processor from which on a process is at work
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_watched_parents: set[int] = set()


def die_with_parent(parent_pid: int, *, grace_s: float = 0.0) -> None:
    """End this process with exit code 1 when ``parent_pid`` has ended, ``grace_s`` later; the second call does nothing.
    A thread waits for the parent's end in the kernel.  The kernel's own parent-death signal does not help: it fires
    when the parent's *thread* ends, and a program may start engines in threads."""
    if parent_pid in _watched_parents:
        return
    _watched_parents.add(parent_pid)
    try:
        parent = ProcessHandle(parent_pid)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent_pid:  # the parent has ended, and another process has its pid
        os._exit(1)

    def watch() -> None:
        parent.wait()
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def die_with_launcher(*, grace_s: float = 0.0) -> None:
    """``die_with_parent`` for a rank that torchrun or another launcher started.  If the agent was killed while this
    process still imported, the parent is process 1, which never ends."""
    parent_pid = os.getppid()
    if parent_pid == 0:  # this process is the first of a container
        return
    if parent_pid == 1 and env.has_torchrun_agent() and not _is_python(parent_pid):
        os._exit(1)
    die_with_parent(parent_pid, grace_s=grace_s)


def _is_python(pid: int) -> bool:
    """Whether the process seems to run torchrun, as the first process of a container may."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return b"python" in command or b"torchrun" in command


def end_process(process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Send SIGTERM, which torchrun passes to all ranks; kill after ``timeout_s``, which ends the ranks too."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ChildRanks:
    """Processes of ranks that this process started: each runs a module and reads its spec from standard input.  The
    module's main begins with ``ignore_stop_signals``.  The first of ``inputs`` is for ``first_rank``, the others for
    the ranks after it."""

    def __init__(
        self, module: str, inputs: Sequence[bytes], *, first_rank: int = 1, pass_fds: Sequence[int] = ()
    ) -> None:
        self._first_rank = first_rank
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for text in inputs:
                self._children.append(start_child(module, text, pass_fds=pass_fds))
        except BaseException:
            self.kill()
            raise

    def check(self) -> None:
        """Raise ``RankError`` for the first rank that has ended."""
        for rank, child in enumerate(self._children, start=self._first_rank):
            code = child.poll()
            if code is not None:
                raise RankError(rank, f"process {child.pid} ended with {describe_exit(code)}")

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank."""
        return {rank: child.pid for rank, child in enumerate(self._children, start=self._first_rank)}

    def exit_code(self, rank: int) -> int | None:
        """Return how a rank's process ended, negative for a signal; None while it runs."""
        return self._children[rank - self._first_rank].poll()

    def is_alive(self) -> bool:
        """Return whether all these processes run."""
        return all(child.poll() is None for child in self._children)

    def wait(self, *, timeout_s: float) -> None:
        """Wait for all ranks to end by themselves; kill those that still run after ``timeout_s``.  While a rank is at
        work only its processor time counts: on a busy machine it needs longer for the same."""
        left_s, looked_s, used_s = timeout_s, time.monotonic(), self._processor_s()
        while left_s > 0 and (running := [child for child in self._children if child.poll() is None]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(max(0.05, min(_LOOK_S, left_s)))
            before_s, looked_s = looked_s, time.monotonic()
            before, used_s = used_s, self._processor_s()
            passed_s, worked_s = looked_s - before_s, max(now - then for now, then in zip(used_s, before, strict=True))
            left_s -= worked_s if worked_s >= _WORKS * passed_s else passed_s
        self.kill()

    def _processor_s(self) -> list[float]:
        """What each rank has used of the processors; 0 if it has ended."""
        return [process_vitals(child.pid)[1] / _TICKS_PER_S for child in self._children]

    def kill(self) -> None:
        """Kill and reap every rank that still runs."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()
