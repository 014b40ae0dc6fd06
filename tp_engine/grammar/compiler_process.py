"""Compiles each grammar in a process of its own first: there it may crash, or take all its time and memory.

::

    CompilerProcess.try_out      main of this module                 a fork of it, for one grammar
    a thread of rank 0 --------> waits for grammars, forks --------> limits itself, compiles, finds the first tokens
                       <-------- reads its words, and how it ended

The process starts with the first grammar, within some tenths of a second, and takes 20 MB.  It imports neither torch
nor numpy, inherits no sockets, and ends with its parent.
"""

import ctypes
import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from tp_engine.child_process import start_child
from tp_engine.errors import RequestError
from tp_engine.grammar.library import (
    SpecialTokens,
    byte_tokens,
    grammar_text,
    llguidance,
    new_matcher,
    parser_limits,
    refusal,
)
from tp_engine.structured_outputs import PARAM, StructuredOutputsParams
from tp_engine.units import KIB, MIB

_MEMORY_BYTES = 256 * MIB
_STACK_BYTES = 4 * MIB  # threads that compile what has passed here have more
_WALL_PER_CPU = 10.0
_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_MOST_WORDS = 4096
_MAPPED, _RESIDENT = 0, 1  # columns of /proc/self/statm
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGALRM)
_TOO_DEEP = (signal.SIGSEGV, signal.SIGBUS)


class TookTooLongError(RequestError):
    """A grammar that was not compiled within its time."""


class CompilerProcess:
    """The process; it starts with the first grammar, and again after its death.

    ``special_tokens`` are those that grammars may name; without them, a grammar that names some is only parsed.  For
    one thread at a time, but any may call ``close``.
    """

    def __init__(self, special_tokens: SpecialTokens | None) -> None:
        self._special_tokens = special_tokens
        self._child: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._closed = False

    def try_out(self, params: StructuredOutputsParams, *, cpu_s: float, niceness: int = 0) -> int:
        """Compile ``params`` there, within ``cpu_s`` seconds of processor time; the bytes of memory that it took.

        Raises ``RequestError`` if that fails, ``TookTooLongError`` if the time was too short, and ``RuntimeError`` if
        the process itself can not run.
        """
        wall_s = _WALL_PER_CPU * cpu_s + _GRACE_S
        job = {"params": dataclasses.asdict(params), "cpu_s": cpu_s, "wall_s": wall_s, "niceness": niceness}
        answer = self._ask(json.dumps(job).encode(), wall_s + _GRACE_S)
        if answer["signal"] in _OUT_OF_TIME:
            error = refusal(params, f"it takes more than {cpu_s:g} s to compile; make it simpler")
            raise TookTooLongError(str(error), param=PARAM)
        if answer["signal"] in _TOO_DEEP:
            raise refusal(params, "it is nested too deeply for the grammar library; make it flatter")
        if answer["signal"]:
            raise refusal(params, f"it needs more than {_MEMORY_BYTES // MIB} MiB to compile; make it simpler")
        if answer["words"]:
            raise RequestError(answer["words"], param=PARAM)
        return int(answer["num_bytes"])

    def close(self) -> None:
        """End the process; ``try_out`` then raises ``RuntimeError``."""
        self._closed = True
        self._end()

    def _ask(self, job: bytes, timeout_s: float) -> dict[str, Any]:
        """The answer, of a second process if the first ends or hangs."""
        for _ in range(2):
            if self._closed:
                break
            link = self._link or self._start()
            try:
                link.send_bytes(job)
                if link.poll(timeout_s):
                    answer: dict[str, Any] = json.loads(link.recv_bytes())
                    return answer
            except (EOFError, OSError):
                pass
            self._end()
        raise RuntimeError("the process that compiles grammars has ended" + ("" if self._closed else ", twice"))

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            settings = {
                "descriptor": theirs.fileno(),
                "parent_pid": os.getpid(),
                "special_tokens": None if self._special_tokens is None else dataclasses.asdict(self._special_tokens),
            }
            self._child = start_child(
                __name__, json.dumps(settings).encode(), own_session=True, pass_fds=(theirs.fileno(),)
            )
        self._link = Connection(ours.detach())
        return self._link

    def _end(self) -> None:
        child, link, self._child, self._link = self._child, self._link, None, None
        if child is not None:
            child.kill()
            child.wait()
        if link is not None:
            link.close()


def main() -> int:
    """Try out the grammars that come through the settings' descriptor, until the other end or the parent is gone."""
    settings = json.loads(sys.stdin.buffer.read())
    parent = os.pidfd_open(settings["parent_pid"])
    if os.getppid() != settings["parent_pid"]:
        return 1
    special = settings["special_tokens"]
    tokens = byte_tokens() if special is None else byte_tokens(SpecialTokens(**special))
    prctl = ctypes.CDLL(None).prctl
    with Connection(settings["descriptor"]) as link:
        while parent not in wait([link, parent]):
            try:
                job = json.loads(link.recv_bytes())
            except EOFError:
                break
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                link.close()
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                _try_out(job, writer, tokens, knows_special=special is not None)
            os.close(writer)
            if parent in wait([reader, parent]):
                break
            with open(reader, encoding="utf-8", errors="replace") as stream:
                words = stream.read()
            _, status, usage = os.wait4(pid, 0)
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            num_bytes = max(0, usage.ru_maxrss * KIB - _own_bytes(_RESIDENT))
            link.send_bytes(json.dumps({"words": words, "signal": number, "num_bytes": num_bytes}).encode())
    return 0


def _try_out(job: dict[str, Any], writer: int, tokens: Any, *, knows_special: bool) -> NoReturn:
    """Compile a grammar in a fork, write why it can not be used, or nothing, and end this process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.nice(job["niceness"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_AS, _own_bytes(_MAPPED) + _MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_PROF, job["cpu_s"])
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"])
    words = ""
    try:
        params, warnings = StructuredOutputsParams(**job["params"]), []
        if not knows_special:
            is_error, warnings = llguidance().LLMatcher.validate_grammar_with_warnings(
                grammar_text(params), None, limits=parser_limits()
            )
            if is_error:
                raise refusal(params, warnings[0])
        if not any("no tokenizer" in warning for warning in warnings):
            new_matcher(params, tokens)
    except RequestError as error:
        words = str(error)
    except MemoryError:
        os.abort()
    except BaseException as error:  # of the library too: it must not go on in two processes
        words = f"the grammar library failed: {type(error).__name__}: {error}"
    os.write(writer, words.encode()[:_MOST_WORDS])
    os._exit(0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _own_bytes(kind: int) -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[kind]) * resource.getpagesize()
