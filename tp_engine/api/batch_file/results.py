"""The results of a job: written one whole line at a time, and read again when the job is resumed.

The result files are a job's only memory.  A process that is killed leaves whole lines and at most one torn line at the
end; the next run cuts the torn line off and skips the requests that the whole lines answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from tp_engine.api.batch_file.lines import ResultLine, line_number
from tp_engine.errors import ConfigError
from tp_engine.system.closing import Closing
from tp_engine.system.files import sync_folder

_SYNC_PERIOD_S = 5.0
_LINE_START = b'{"id":'


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    message: str


class _WrittenLine(msgspec.Struct):
    """The fields of a result that a resumed job needs; the decoder skips the others."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


def digest(custom_id: str) -> bytes:
    """16 bytes that stand for a ``custom_id``, of which there may be millions."""
    return blake2b(custom_id.encode(), digest_size=16).digest()


class EarlierResults:
    """What earlier runs wrote, at about 110 bytes per line.

    ``answered`` has requests with a result: the ``digest`` of the ``custom_id`` -> whether the result is an error.
    ``refused`` has the numbers of lines that were not requests.
    """

    def __init__(self) -> None:
        self.answered: dict[bytes, bool] = {}
        self.refused: set[int] = set()

    def __len__(self) -> int:
        return len(self.answered) + len(self.refused)

    def add(self, path: Path, number: int, text: bytes) -> None:
        """Remember line ``number`` of ``path``; raises ``ConfigError`` unless it is a result.

        A refused duplicate counts by its line number: its ``custom_id`` is that of another request.
        """
        try:
            line = msgspec.json.decode(text, type=_WrittenLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{str(path)!r} has a line {number} that is not a batch result ({error}); give another file"
            ) from None
        if line.response is not None and line.custom_id is not None:
            self.answered[digest(line.custom_id)] = line.error is not None
        else:
            self.refused.add(line_number(line.id) or 0)


class Results(Closing):
    """The files of a job: one for all lines, or a second one for errors.  ``earlier`` is what they had before.

    ``output`` None is standard output.  ``resume`` false refuses files that have results.
    """

    def __init__(self, output: Path | None, errors: Path | None = None, *, resume: bool = True) -> None:
        self.earlier = EarlierResults()
        with contextlib.ExitStack() as opened:
            self._files = [_ResultFile(path, self.earlier, opened) for path in (output, errors) if path is not None]
            if len(self.earlier) and not resume:
                raise ConfigError(
                    f"{str(output or errors)!r} has {len(self.earlier)} results, and --no-resume is given; remove it, "
                    "or give another file"
                )
            self._answers = None if output is None else self._files[0]
            self._errors = self._answers if errors is None else self._files[-1]
            self._opened = opened.pop_all()
        self._synced_s = time.monotonic()

    def write(self, line: ResultLine) -> None:
        """Write one result; it survives the end of this process."""
        file = self._answers if line.error is None else self._errors
        if file is None:
            sys.stdout.buffer.write(line.encode())
            sys.stdout.buffer.flush()
        else:
            file.write(line.encode())

    def sync_if_due(self) -> None:
        """Sync written lines to the disk if the last time was seconds ago; call it often."""
        if (now_s := time.monotonic()) - self._synced_s > _SYNC_PERIOD_S:
            self._synced_s = now_s
            for file in self._files:
                file.sync()

    def close(self) -> None:
        """Sync all lines to the disk and close the files."""
        self._opened.close()


class _ResultFile:
    """One file of results, opened after its last whole line, locked against a second job, and closed by ``opened``."""

    def __init__(self, path: Path, earlier: EarlierResults, opened: contextlib.ExitStack) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        opened.callback(os.close, self._descriptor)
        self._is_synced = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{str(path)!r} is being written by another job; wait for it, or give another file"
            ) from None
        self._resume(earlier)
        sync_folder(path.parent)
        opened.callback(os.fsync, self._descriptor)

    def write(self, data: bytes) -> None:
        """Append one line with one call, so that a kill tears at most the last line; for any thread."""
        with self._lock, self._explained():
            self._is_synced = False
            written = os.write(self._descriptor, data)
            while written < len(data):  # a nearly full disk, or a signal
                written += os.write(self._descriptor, data[written:])

    def sync(self) -> None:
        """Sync written lines to the disk."""
        if not self._is_synced:
            with self._explained():
                os.fdatasync(self._descriptor)
            self._is_synced = True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{error.strerror}; what is written so far is kept, and the same command continues from there"
            raise OSError(error.errno, message, str(self._path)) from error

    def _resume(self, earlier: EarlierResults) -> None:
        """Read the existing results and cut off a torn last line; a file of anything else stays as it is."""
        whole_bytes = 0
        with self._path.open("rb") as stream:
            for number, text in enumerate(stream, start=1):
                if not text.endswith(b"\n"):
                    # a torn result: its beginning, or zeros after a power failure
                    if text[: len(_LINE_START)] != _LINE_START[: len(text)] and text.strip(b"\0"):
                        name = str(self._path)
                        raise ConfigError(f"{name!r} has a line {number} that is not a batch result; give another file")
                    break
                earlier.add(self._path, number, text)
                whole_bytes += len(text)
        os.ftruncate(self._descriptor, whole_bytes)
