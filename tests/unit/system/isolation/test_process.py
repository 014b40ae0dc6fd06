"""Calls of functions in processes that may die: what comes back, how each limit ends one, and that nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.unit.system.isolation import functions
from tp_engine.errors import RequestError
from tp_engine.system.isolation.cancellation import Cancellation, cancelled_by
from tp_engine.system.isolation.process import (
    CallError,
    CancelledCallError,
    CrashedError,
    IsolatedProcess,
    Limits,
    OutOfMemoryError,
    OutOfTimeError,
    OutputTooLargeError,
)
from tp_engine.system.units import MIB

DEADLINE_S = 150.0
LIMITS = Limits(cpu_s=10.0, memory_bytes=256 * MIB)
QUICK = Limits(cpu_s=0.2, memory_bytes=256 * MIB)


@pytest.fixture(scope="module")
def process() -> Iterator[IsolatedProcess]:
    made = IsolatedProcess(prepare=(functions.prepare, "told "))
    assert output(made, functions.told, b"once") == b"told once"
    yield made
    made.close()


def output(process: IsolatedProcess, function: Callable[..., bytes], data: bytes, *descriptors: int) -> bytes:
    return bytes(process.call(function, data, LIMITS, descriptors=descriptors).output)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pid_in(path: Path) -> int:
    eventually(lambda: path.exists() and bool(path.read_text()))
    return int(path.read_text())


def test_bytes_go_there_and_back(process: IsolatedProcess) -> None:
    """Oracle: the same bytes, small and larger than any buffer of a socket, and what the call took."""
    for data in (b"", b"abc", os.urandom(3 * MIB)):
        assert output(process, functions.echo, data) == data
    answer = process.call(functions.zeros, b"%d" % (50 * MIB), LIMITS)
    assert answer.output.nbytes == 50 * MIB and not any(answer.output[:: 1 << 16]) and answer.output.readonly
    assert 45 * MIB < answer.peak_bytes < 150 * MIB


def test_a_file_of_the_caller_is_written_there(process: IsolatedProcess) -> None:
    """Oracle: its content here."""
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    assert output(process, functions.write_into, b"ab", file) == b"4"
    assert os.pread(file, 9, 0) == b"abab"
    with pytest.raises(OutputTooLargeError):
        small = Limits(cpu_s=10.0, memory_bytes=256 * MIB, output_bytes=MIB)
        process.call(functions.write_into, bytes(MIB), small, descriptors=[file])
    os.close(file)


@pytest.mark.parametrize(
    ("function", "limits", "kind", "words"),
    [
        (functions.busy, QUICK, OutOfTimeError, r"takes more than 0\.2 s"),
        (functions.idle, Limits(cpu_s=10, wall_s=0.2, memory_bytes=MIB), OutOfTimeError, r"takes more than 0\.2 s"),
        (functions.exhaust, LIMITS, OutOfMemoryError, "needs more than 256 MiB"),
        (functions.abort, LIMITS, OutOfMemoryError, "needs more than 256 MiB"),
        (functions.fail, LIMITS, CrashedError, "KeyError: 'xxx"),
        (functions.crash, LIMITS, CrashedError, "SIGSEGV"),
    ],
)
def test_a_call_without_an_output_has_a_reason(
    process: IsolatedProcess, function: Callable[..., bytes], limits: Limits, kind: type[CallError], words: str
) -> None:
    """Oracle: the type and the words; the process serves the next call."""
    with pytest.raises(kind, match=words) as caught:
        process.call(function, b"", limits)
    assert len(str(caught.value)) < 5000
    assert getattr(caught.value, "is_overflow", False) == (function is functions.crash)
    assert output(process, functions.echo, b"next") == b"next"


def test_a_refusal_comes_back_as_it_was_raised(process: IsolatedProcess) -> None:
    """Oracle: its words, param and code; words without end are cut."""
    with pytest.raises(RequestError, match="no: ééé") as caught:
        process.call(functions.refuse, "é".encode(), LIMITS)
    assert (caught.value.param, caught.value.code) == ("field", "bad_field")
    with pytest.raises(RequestError) as long:
        process.call(functions.refuse, b"\xf0\x9f\x98\x80" * 10_000, LIMITS)
    assert len(str(long.value)) == 4096


def test_an_output_is_bounded(process: IsolatedProcess) -> None:
    """Oracle: the limit in the words."""
    with pytest.raises(OutputTooLargeError, match="makes more than 1 MiB"):
        process.call(functions.zeros, b"%d" % (MIB + 1), Limits(cpu_s=5, memory_bytes=64 * MIB, output_bytes=MIB))


def test_a_call_ends_when_nobody_waits_any_more(process: IsolatedProcess, tmp_path: Path) -> None:
    """Oracle: the error, and the fork's process is gone; a call that is cancelled before it begins never does."""
    cancellation = Cancellation()
    with ThreadPoolExecutor(1) as threads:

        def work() -> None:
            with cancelled_by(cancellation):
                process.call(functions.idle, os.fsencode(tmp_path / "pid"), LIMITS)

        future = threads.submit(work)
        pid = pid_in(tmp_path / "pid")
        cancellation.cancel()
        with pytest.raises(CancelledCallError):
            future.result(DEADLINE_S)
        eventually(lambda: not is_running(pid))
        with pytest.raises(CancelledCallError):
            threads.submit(work).result(DEADLINE_S)
    assert output(process, functions.echo, b"next") == b"next"


def test_calls_do_not_wait_for_each_other_but_for_places(tmp_path: Path) -> None:
    """Oracle: a call passes one that never ends; with all places taken, the next waits until one is cancelled, and can
    be cancelled itself while it waits."""
    process = IsolatedProcess(max_calls=2)
    cancellations = [Cancellation() for _ in range(3)]

    def stay(number: int) -> None:
        with cancelled_by(cancellations[number]), pytest.raises(CancelledCallError):
            process.call(functions.idle, os.fsencode(tmp_path / str(number)), LIMITS)

    threads = [threading.Thread(target=stay, args=(number,)) for number in range(3)]
    threads[0].start()
    pid_in(tmp_path / "0")
    assert output(process, functions.echo, b"passes") == b"passes"
    threads[1].start()
    pid_in(tmp_path / "1")
    threads[2].start()
    cancellations[2].cancel()
    threads[2].join(DEADLINE_S)
    assert not (tmp_path / "2").exists()
    with ThreadPoolExecutor(1) as waiting:
        future = waiting.submit(output, process, functions.echo, b"waited")
        assert not future.done()
        cancellations[0].cancel()
        assert future.result(DEADLINE_S) == b"waited"
    cancellations[1].cancel()
    for thread in threads:
        thread.join(DEADLINE_S)
    process.close()


def test_it_starts_when_needed_and_again_when_it_has_died(tmp_path: Path) -> None:
    """Oracle: the children of this process; a call whose process is killed is made again, by the next; a fork has no
    descriptors but its own, although some could be inherited."""
    before = set(psutil.Process().children())
    process = IsolatedProcess()
    assert set(psutil.Process().children()) == before
    with socket.socket() as inheritable, (tmp_path / "secret").open("wb") as file:
        for one in (inheritable.fileno(), file.fileno()):
            os.set_inheritable(one, True)
        links = output(process, functions.descriptors, b"").decode().split("\n")
    assert not any(link.startswith(("socket:", str(tmp_path))) for link in links)
    (first,) = set(psutil.Process().children()) - before
    with ThreadPoolExecutor(1) as threads:
        path = tmp_path / "pid"
        cancellation = Cancellation()

        def stay() -> None:
            with cancelled_by(cancellation):
                process.call(functions.idle, os.fsencode(path), LIMITS)

        future = threads.submit(stay)
        pid = pid_in(path)
        path.unlink()
        first.kill()
        eventually(lambda: not is_running(pid))
        assert pid_in(path) != pid
        cancellation.cancel()
        assert isinstance(future.exception(DEADLINE_S), CancelledCallError)
    process.close()
    assert set(psutil.Process().children()) == before
    with pytest.raises(RuntimeError, match="has ended"):
        process.call(functions.echo, b"", LIMITS)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Oracle: neither the process nor its fork is left when the parent is killed meanwhile."""
    script = (
        "from tests.unit.system.isolation import functions\n"
        "from tp_engine.system.isolation.process import IsolatedProcess, Limits\n"
        f"IsolatedProcess().call(functions.idle, {os.fsencode(tmp_path / 'pid')!r}, Limits(cpu_s=9, memory_bytes=1))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[4])
    fork = pid_in(tmp_path / "pid")
    below = [fork, psutil.Process(fork).ppid()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(lambda: not any(map(is_running, below)))


OWNERS = """
import os
from tests.unit.system.isolation import functions
from tp_engine.system.isolation.process import IsolatedProcess, Limits, needed_by, not_needed_by

class Owner:
    pass

process, limits, one, other = IsolatedProcess(), Limits(cpu_s=9, memory_bytes=1 << 28), Owner(), Owner()

def children():
    return sum(text.rsplit(")", 1)[1].split()[1] == str(os.getpid()) for text in map(told, os.listdir("/proc")))

def told(name):
    try:
        return open(f"/proc/{name}/stat").read()
    except OSError:
        return ") - -"

def call():
    return bytes(process.call(functions.echo, b"told", limits).output) == b"told"

needed_by(one); needed_by(other)
assert call() and children() == 1
not_needed_by(one); not_needed_by(one); not_needed_by(Owner())
assert children() == 1
if (forked := os.fork()) == 0:
    needed_by(one)
    is_own = children() == 0 and call() and children() == 1
    not_needed_by(one)
    os._exit(0 if is_own and children() == 0 else 1)
assert os.waitpid(forked, 0)[1] == 0 and children() == 1 and call() and children() == 1
not_needed_by(other)
assert children() == 0 and call()
"""


def test_it_ends_with_the_last_that_needs_it() -> None:
    """Oracle: the children of a program with two owners, and of its fork, which ends none but its own."""
    done = subprocess.run(
        [sys.executable, "-c", OWNERS],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
