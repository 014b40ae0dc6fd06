"""The process that forks itself for each isolated call (``process.py``): it waits for calls, and for the forks' ends.

A call comes as one message of the link: a ``CallHeader``, with the descriptors of the caller's socket, of a file in
memory that has the function's input, of another one for its output, and those that the caller passes.  How the fork
ended goes back through the caller's socket; when the caller closes that, its fork is killed.
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from tp_engine.errors import RequestError
from tp_engine.system.units import KIB

MAX_MESSAGE = 4096
MAX_DESCRIPTORS = 16
# How a fork ends by itself, as its exit code: with an output, with the words of an error in its place, or with neither.
ANSWERED, REFUSED, FAILED, OUT_OF_MEMORY, TOO_LARGE = 0, 2, 3, 4, 5
_MOST_WORDS = 4096
_LEAST_FILE = 64 * KIB  # the words of an error fit into it
_PR_SET_PDEATHSIG = 1
_MAPPED, _RESIDENT = 0, 1  # columns of /proc/self/statm


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHeader:
    """What to call, as ``module:function``, and its limits."""

    function: str
    cpu_s: float
    wall_s: float
    memory_bytes: int
    stack_bytes: int
    output_bytes: int
    niceness: int


def main() -> int:
    """Serve the calls that come through the settings' descriptor, until the other end or the parent is gone."""
    settings = json.loads(sys.stdin.buffer.read())
    parent = os.pidfd_open(settings["parent_pid"])
    if os.getppid() != settings["parent_pid"]:
        return 1
    if settings["prepare"] is not None:
        name, text = settings["prepare"]
        with contextlib.suppress(Exception):  # each call tells why
            _function(name)(text)
    gc.freeze()  # what is here now stays shared with the forks
    with socket.socket(fileno=settings["descriptor"]) as link:
        _Host(link, parent).run()
    return 0


class _Host:
    """The calls that run; ``run`` waits for a new one, for the end of one, and for a caller that leaves."""

    def __init__(self, link: socket.socket, parent: int) -> None:
        self._link = link
        self._parent = parent
        self._calls: dict[int, _Call] = {}  # by the descriptors of their processes and of their callers' sockets
        self._poll = select.poll()
        self._prctl = ctypes.CDLL(None).prctl

    def run(self) -> None:
        self._poll.register(self._parent, select.POLLIN)
        self._poll.register(self._link, select.POLLIN)
        while True:
            descriptor, _ = self._poll.poll()[0]  # one at a time: the next round may not know the others any more
            if descriptor == self._parent:
                return
            if descriptor == self._link.fileno():
                if not self._begin():
                    return
                continue
            call = self._calls[descriptor]
            if descriptor == call.process:
                self._end(call)
            else:
                signal.pidfd_send_signal(call.process, signal.SIGKILL)
                self._poll.unregister(call.caller)  # its end comes next

    def _begin(self) -> bool:
        """Fork for the next call; False if there will be none."""
        message, descriptors, _, _ = socket.recv_fds(self._link, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not message:
            return False
        caller, *files = descriptors
        header = CallHeader(**json.loads(message))
        with contextlib.suppress(Exception):  # a call tells why
            _function(header.function)  # once for all forks
        try:
            identifier = self._fork(header, caller, files)
        except OSError:  # no memory, or no room for a process: the caller sees that its socket is closed
            os.close(caller)
            return True
        finally:
            for file in files:
                os.close(file)
        call = _Call(identifier, os.pidfd_open(identifier), socket.socket(fileno=caller))
        self._calls[call.process] = self._calls[caller] = call
        self._poll.register(call.process, select.POLLIN)
        self._poll.register(call.caller, 0)  # tells when the other end has been closed
        return True

    def _fork(self, header: CallHeader, caller: int, files: Sequence[int]) -> int:
        """The identifier of a new process, which calls the function and ends."""
        host = os.getpid()
        if identifier := os.fork():
            return identifier
        try:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == host:
                for descriptor in (caller, self._parent, self._link.fileno(), *self._calls):
                    os.close(descriptor)
                _run(header, *files)
        finally:
            os._exit(FAILED)

    def _end(self, call: "_Call") -> None:
        _, status, usage = os.wait4(call.identifier, 0)
        ended = {
            "exit_code": os.waitstatus_to_exitcode(status),
            "peak_bytes": max(0, usage.ru_maxrss * KIB - _own_bytes(_RESIDENT)),
        }
        for descriptor in (call.process, call.caller.fileno()):
            del self._calls[descriptor]
            with contextlib.suppress(KeyError):  # the caller has left
                self._poll.unregister(descriptor)
        with call.caller, contextlib.suppress(OSError):
            call.caller.send(json.dumps(ended).encode())
        os.close(call.process)


@dataclass(frozen=True, slots=True)
class _Call:
    """A fork, the descriptor that tells of its end, and the socket of its caller."""

    identifier: int
    process: int
    caller: socket.socket


def _run(header: CallHeader, source: int, output: int, *descriptors: int) -> NoReturn:
    """Call the function within its limits, and end this process, which is a fork."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    os.nice(header.niceness)
    signal.setitimer(signal.ITIMER_PROF, header.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, header.wall_s)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, max(header.output_bytes, _LEAST_FILE))
    _limit(resource.RLIMIT_STACK, header.stack_bytes)
    words = ""
    try:
        data = os.pread(source, os.fstat(source).st_size, 0)
        _limit(resource.RLIMIT_AS, _own_bytes(_MAPPED) + header.memory_bytes)
        code = _written(output, header.output_bytes, _function(header.function)(data, *descriptors))
    except RequestError as error:
        code, words = REFUSED, json.dumps([str(error)[:_MOST_WORDS], error.param, error.code])
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # panics of libraries too: this must not go on in two processes
        code = TOO_LARGE if isinstance(error, OSError) and error.errno == errno.EFBIG else FAILED
        words = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
    if words:
        os.pwrite(output, words.encode(errors="replace"), 0)
    os._exit(code)


def _written(output: int, most_bytes: int, data: Any) -> int:
    """The exit code after ``data`` has been written."""
    view = memoryview(data).cast("B")
    if len(view) > most_bytes:
        return TOO_LARGE
    while len(view):
        view = view[os.write(output, view) :]
    return ANSWERED


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _own_bytes(kind: int) -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[kind]) * resource.getpagesize()
