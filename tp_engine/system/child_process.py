"""Processes that this process starts: each runs the ``main`` of a module of the package, with settings on its input.

A child imports from where its parent does, and never from the current directory, which may hold a ``queue.py`` or a
``tokenizers.py`` that belongs to somebody else.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

_ROOT = str(Path(__file__).resolve().parents[2])
# The first line of standard input is the import path; the settings follow.  If there is none, the parent was
# interrupted, and says so itself.  The module's name stays on the command line, where process lists show it.
_ENTER = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline() or sys.exit(1)); "
    "from tp_engine.system.importing import run_main; sys.exit(run_main(sys.argv.pop()))"
)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_children: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_children.clear)


def start_child(
    module: str,
    settings: bytes,
    *,
    own_session: bool = False,
    pass_fds: Sequence[int] = (),
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that calls ``module.main()``, and write ``settings`` to its standard input, which then ends.

    ``own_session``: signals to this process's group do not reach it; otherwise its main begins with
    ``ignore_stop_signals``.
    ``output`` takes its standard output and error.  If the process ends before it has read the settings, its exit code
    says so, and no error is raised here.
    """
    first_line = json.dumps(_import_path()).encode() + b"\n"
    with contextlib.nullcontext() if own_session else _stop_signals_held_back():
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _ENTER, module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=_folder(),
            pass_fds=pass_fds,
            start_new_session=own_session,
        )
    try:
        _children.add(child)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as stream:
            stream.write(first_line + settings)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return child


def kill_children() -> None:
    """Kill this process's children, from any thread, before it ends without closing anything.  Otherwise they would end
    seconds later, and log that their parent has gone."""
    for child in list(_children):
        child.kill()


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM; a child's main calls this first: the terminal's Ctrl-C, and what ``timeout`` sends to
    its group, reach every process, and the parent decides."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _import_path() -> list[str]:
    """``sys.path`` in absolute paths; for the current folder (``''``) this package's own, if nothing else has it.  A
    relative path may lead elsewhere than when this package was imported, so that the package's own comes last then."""
    entries = [_absolute(entry) for entry in sys.path]
    if _ROOT in entries:
        return [entry for entry in entries if entry]
    entries = [entry or _ROOT for entry in entries]
    return entries if _ROOT in entries else [*entries, _ROOT]


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry) if entry else ""
    except FileNotFoundError:  # the current folder is gone
        return ""


def _folder() -> str | None:
    """None, the parent's folder; the root where that has been deleted: MKL ends a process that is nowhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.sep
    return None


@contextlib.contextmanager
def _stop_signals_held_back() -> Iterator[None]:
    """A child that starts within has these signals blocked until ``ignore_stop_signals``: it neither ends nor prints a
    traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
