"""Calls of functions in processes that may die: each within limits of time and memory, and only while its caller waits.

::

    IsolatedProcess.call              main of host.py                   a fork of it, for one call
    any thread ---------------------> imports, waits for calls, forks -> limits itself, calls the function,
               <--------------------- tells how a fork ended             writes the output into a file in memory
    cancelled, or dead -------------> kills the fork

For what is made of a client's data by code that has no bound of its own: a library that may crash or overflow its
stack, and work whose time or memory is the product of two sizes.  A call costs some milliseconds of processor time.

::

    process = IsolatedProcess()                                   # starts with its first call; any thread may use it
    limits = Limits(cpu_s=5.0, memory_bytes=256 * MIB)
    output = process.call(decode, data, limits).output            # decode(data) in a fork: bytes to bytes
    output = process.call(decode_into, data, limits, descriptors=[file.fileno()]).output      # decode_into(data, fd)

``decode`` is a function at the top of a module, which the process imports; it takes bytes, and returns what
``memoryview`` takes.  A large output is mapped, not copied, so that ``numpy.frombuffer(output, ...)`` costs nothing.  A
file that the caller passes (``os.memfd_create``) has another number there, which comes after the data; the function
may write ``output_bytes`` into it.  ``prepare`` is called once in the process itself: it imports what all calls need,
so that each finds it there.  The modules must start no threads when they are imported: a fork would lack them.

A ``RequestError`` of the function comes back as one, with ``param`` and ``code``.  A call that has no output otherwise
raises a ``CallError``, whose type is the reason:

| error | what happened |
| --- | --- |
| ``OutOfTimeError`` | it took more processor time or time than it may |
| ``OutOfMemoryError`` | it took more memory than it may, or the machine's ran out |
| ``OutputTooLargeError`` | its output is larger than it may be |
| ``CrashedError`` | an exception, in its words; or a signal, ``is_overflow`` if it is that of a stack that overflowed |
| ``CancelledCallError`` | nobody waits any more (``cancellation.py``); the caller should end, too |

The process imports neither torch nor numpy unless a function does, inherits no sockets, and ends with its parent.
Modules have theirs, which all engines of a program share; they end when the last engine does (``needed_by``).
"""

import contextlib
import dataclasses
import json
import mmap
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tp_engine.errors import RequestError
from tp_engine.system.child_process import start_child
from tp_engine.system.closing import Closing
from tp_engine.system.isolation import host
from tp_engine.system.isolation.cancellation import Cancellation, current_cancellation
from tp_engine.system.units import MIB, shown_size

_MAX_CALLS = 8
_WALL_PER_CPU = 10.0
_GRACE_S = 10.0
_MAPPED_FROM = 1 * MIB
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGALRM)
_OVERFLOW = (signal.SIGSEGV, signal.SIGBUS)
_OUT_OF_MEMORY = (signal.SIGABRT, signal.SIGKILL)  # of libraries that abort, and of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one call: seconds of processor time, and of time (ten times as many and 10 more unless given); bytes beyond
    those of the process, of the stack, and of the output."""

    cpu_s: float
    memory_bytes: int
    wall_s: float | None = None
    stack_bytes: int = 8 * MIB
    output_bytes: int = 64 * MIB
    niceness: int = 0


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The output of a call, and the most memory that it took."""

    output: memoryview
    peak_bytes: int


class CallError(Exception):
    """A call without an output; its text goes on after "it"."""


class OutOfTimeError(CallError):
    """A call took longer than it may."""


class OutOfMemoryError(CallError):
    """A call needed more memory than it may have."""


class OutputTooLargeError(CallError):
    """A call made more output than it may."""


class CrashedError(CallError):
    """A call ended by an exception, or by a signal: of a stack that was too small if ``is_overflow``."""

    def __init__(self, words: str, *, is_overflow: bool = False) -> None:
        super().__init__(words)
        self.is_overflow = is_overflow


class CancelledCallError(CallError):
    """Nobody waits for the call any more."""


_processes: weakref.WeakSet["IsolatedProcess"] = weakref.WeakSet()
_owners: weakref.WeakSet[object] = weakref.WeakSet()


def needed_by(owner: object) -> None:
    """Keep the processes until ``owner`` needs them no more, or is gone."""
    _owners.add(owner)


def not_needed_by(owner: object) -> None:
    """End the processes if ``owner`` was the last that needed them; one that was none changes nothing."""
    if owner in _owners:
        _owners.discard(owner)
        if not _owners:
            end_isolated_processes()


def end_isolated_processes() -> None:
    """End all processes of this one until the next call: a call that runs begins again, unless it may not."""
    for process in list(_processes):
        process.end()


def _disown_all() -> None:
    """In a forked process: what is there is the parent's, which goes on with it."""
    _owners.clear()
    for process in list(_processes):
        process.disown()


os.register_at_fork(after_in_child=_disown_all)


class IsolatedProcess(Closing):
    """The process; it starts with the first call, and again after its death.  For any thread; never on an event loop.

    At most ``max_calls`` run at a time, others wait.  ``prepare`` is a function with its argument, a text.
    """

    def __init__(
        self, *, prepare: tuple[Callable[[str], object], str] | None = None, max_calls: int = _MAX_CALLS
    ) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._closed = False
        self._num_free = max_calls
        self._place = threading.Condition()
        _processes.add(self)

    def call(
        self,
        function: Callable[..., object],
        data: bytes,
        limits: Limits,
        *,
        descriptors: Sequence[int] = (),
        repeats: bool = True,
    ) -> CallAnswer:
        """Call ``function(data, *descriptors)`` there; if the process dies meanwhile, again in a new one if it
        ``repeats``.

        Raises the function's ``RequestError``, ``CallError``, and ``RuntimeError`` if the process itself cannot run.
        """
        wall_s = _WALL_PER_CPU * limits.cpu_s + _GRACE_S if limits.wall_s is None else limits.wall_s
        header = host.CallHeader(function=_name(function), **{**dataclasses.asdict(limits), "wall_s": wall_s})
        cancellation = current_cancellation()
        with self._placed(cancellation), _file_in_memory() as source, _file_in_memory() as output:
            _write(source, data)
            message, files = json.dumps(dataclasses.asdict(header)).encode(), (source, output, *descriptors)
            ended = self._ended(message, files, cancellation, wall_s + _GRACE_S, 2 if repeats else 1)
            code = ended["exit_code"]
            if code == host.ANSWERED:
                return CallAnswer(_content(output), ended["peak_bytes"])
            raise _error(code, bytes(_content(output)), limits, wall_s)

    def close(self) -> None:
        """End the process; a call then raises ``RuntimeError``."""
        self._closed = True
        self.end()

    def end(self) -> None:
        """End the process until the next call."""
        self._end(self._link)

    def disown(self) -> None:
        """In a forked process: the next call starts a process of its own."""
        self._lock, self._place = threading.Lock(), threading.Condition()
        self._child = self._link = None

    @contextlib.contextmanager
    def _placed(self, cancellation: Cancellation) -> Iterator[None]:
        """One of the places; raises ``CancelledCallError`` if the wait for one is cancelled."""

        def wake() -> None:
            with self._place:
                self._place.notify_all()

        with cancellation.calling(wake), self._place:
            self._place.wait_for(lambda: self._num_free or cancellation.is_cancelled)
            if cancellation.is_cancelled:
                raise CancelledCallError("was cancelled")
            self._num_free -= 1
        try:
            yield
        finally:
            with self._place:
                self._num_free += 1
                self._place.notify()

    def _ended(
        self, message: bytes, files: Sequence[int], cancellation: Cancellation, timeout_s: float, num_tries: int
    ) -> dict[str, int]:
        """How the call ended, in another process if the first ends or hangs."""
        for _ in range(num_tries):
            link = self._running()
            if link is None:
                break
            if answer := _exchange(link, message, files, cancellation, timeout_s):
                ended: dict[str, int] = json.loads(answer)
                return ended
            if cancellation.is_cancelled:
                raise CancelledCallError("was cancelled")
            self._end(link)
        how = "" if self._closed or num_tries == 1 else ", twice"
        raise RuntimeError(f"the process for isolated calls has ended{how}")

    def _running(self) -> socket.socket | None:
        """The link to the process, which starts if there is none; None once it is closed."""
        with self._lock:
            if self._link is None and not self._closed:
                self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    settings = {
                        "descriptor": theirs.fileno(),
                        "parent_pid": os.getpid(),
                        "prepare": self._prepare and (_name(self._prepare[0]), self._prepare[1]),
                    }
                    self._child = start_child(
                        host.__name__, json.dumps(settings).encode(), own_session=True, pass_fds=(theirs.fileno(),)
                    )
            return self._link

    def _end(self, link: socket.socket | None) -> None:
        """End the process of ``link``, unless another thread has."""
        with self._lock:
            if link is None or link is not self._link:
                return
            child, self._child, self._link = self._child, None, None
        if child is not None:
            child.kill()
            child.wait()
        link.close()


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


@contextlib.contextmanager
def _file_in_memory() -> Iterator[int]:
    descriptor = os.memfd_create("tp_engine call", os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]


def _content(descriptor: int) -> memoryview:
    size = os.fstat(descriptor).st_size
    if size < _MAPPED_FROM:
        return memoryview(os.pread(descriptor, size, 0))
    return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))


def _exchange(
    link: socket.socket, message: bytes, files: Sequence[int], cancellation: Cancellation, timeout_s: float
) -> bytes:
    """What the process tells of a call's end; nothing if it is cancelled, and if the process ends or hangs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def leave() -> None:
        with contextlib.suppress(OSError):  # closed
            ours.shutdown(socket.SHUT_RDWR)

    with ours, cancellation.calling(leave):
        try:
            with theirs:
                socket.send_fds(link, [message], [theirs.fileno(), *files])
            ours.settimeout(timeout_s)
            return ours.recv(host.MAX_MESSAGE)
        except OSError:
            return b""


def _error(code: int, words: bytes, limits: Limits, wall_s: float) -> Exception:
    """Why a call that ended with this exit code has no output."""
    if code == host.REFUSED:
        message, param, error_code = json.loads(words)
        return RequestError(message, param=param, code=error_code)
    if code == host.TOO_LARGE:
        return OutputTooLargeError(f"makes more than {shown_size(limits.output_bytes)}")
    if code == host.OUT_OF_MEMORY or -code in _OUT_OF_MEMORY:
        return OutOfMemoryError(f"needs more than {shown_size(limits.memory_bytes)} of memory")
    if -code in _OUT_OF_TIME:
        is_cpu = -code == signal.SIGPROF
        return OutOfTimeError(f"takes more than {limits.cpu_s if is_cpu else wall_s:g} s")
    if code < 0:
        number = signal.Signals(-code)
        return CrashedError(f"ended with the signal {number.name}", is_overflow=number in _OVERFLOW)
    return CrashedError(words.decode() or f"ended with exit code {code}")
