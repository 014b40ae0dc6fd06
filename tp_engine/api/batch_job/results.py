"""The results of a job: written one whole line at a time, and read again when the job is resumed.

The result files are a job's only memory.  A process that is killed leaves whole lines and at most one torn line at the
end; the next run cuts the torn line off and skips the requests that the whole lines answer.  Of these it keeps about 17
bytes each: a digest of the ``custom_id`` and whether the result is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tp_engine.api.batch_job.lines import ResultLine, line_number
from tp_engine.closing import Closing
from tp_engine.errors import ConfigError
from tp_engine.files import sync_folder

_DIGEST_BYTES = 16

_SYNC_PERIOD_S = 5.0
_LINE_START = b'{"id":'


class ResultFile:
    """One file of results, opened behind its last whole line and locked against a second job."""

    def __init__(self, path: Path, earlier: EarlierResults) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._is_synced = True
        try:
            self._lock()
            self._resume(earlier)
            sync_folder(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, data: bytes) -> None:
        """Append one line with one call, so that a kill tears at most the last line."""
        self._is_synced = False
        with self._explained():
            written = os.write(self._descriptor, data)
            while written < len(data):  # a nearly full disk, or a signal
                written += os.write(self._descriptor, data[written:])

    def sync(self) -> None:
        """Bring written lines to the disk."""
        if not self._is_synced:
            with self._explained():
                os.fdatasync(self._descriptor)
            self._is_synced = True

    def close(self) -> None:
        """Bring written lines to the disk and close the file."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{error.strerror}; what is written so far is kept, and the same command continues from there"
            raise OSError(error.errno, message, str(self._path)) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{str(self._path)!r} is being written by another job; wait for it, or give another file"
            ) from None

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


class StandardOutput:
    """Results for the program behind a pipe; a job that writes there can not be continued."""

    def write(self, data: bytes) -> None:
        """Write one line at once."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def sync(self) -> None:
        """Nothing: there is no disk behind a pipe."""

    def close(self) -> None:
        """Nothing: standard output stays open."""


class Results(Closing):
    """The files of a job: one for all lines, or a second one for errors.  ``earlier`` is what they had before.

    ``output`` None is standard output.  ``resume`` false refuses files that have results.
    """

    def __init__(self, output: Path | None, errors: Path | None = None, *, resume: bool = True) -> None:
        self.earlier = EarlierResults()
        with contextlib.ExitStack() as opened:
            files = [ResultFile(path, self.earlier) for path in (output, errors) if path is not None]
            for file in files:
                opened.callback(file.close)
            if len(self.earlier) and not resume:
                raise ConfigError(
                    f"{str(output or errors)!r} has {len(self.earlier)} results, and --no-resume is given; remove it, "
                    "or give another file"
                )
            self._answers = StandardOutput() if output is None else files[0]
            self._errors = self._answers if errors is None else files[-1]
            self._opened = opened.pop_all()
        self._synced_s = time.monotonic()

    def write(self, line: ResultLine) -> None:
        """Write one result; it survives the end of this process."""
        (self._answers if line.error is None else self._errors).write(line.encode())

    def sync_if_due(self) -> None:
        """Bring written lines to the disk if the last time was seconds ago; call it often."""
        if (now_s := time.monotonic()) - self._synced_s > _SYNC_PERIOD_S:
            self._synced_s = now_s
            self._answers.sync()
            self._errors.sync()

    def close(self) -> None:
        """Bring all lines to the disk and close the files."""
        self._opened.close()


class _LineResponse(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    message: str


class _WrittenLine(msgspec.Struct):
    """The fields of a result that a resumed job needs; the decoder skips the others."""

    id: str
    custom_id: str | None
    response: _LineResponse | None
    error: _Error | None


class EarlierResults:
    """What earlier runs wrote, at about 17 bytes per line.

    ``answered`` are requests with a result, and ``failed`` tells for each whether the result is an error.
    ``refused_lines`` are the numbers of lines that were not requests, unordered.
    """

    def __init__(self) -> None:
        self.answered = CustomIds()
        self.failed = bytearray()
        self.refused_lines = array("q")

    def __len__(self) -> int:
        return len(self.failed) + len(self.refused_lines)

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
            self.answered.add(line.custom_id)
            self.failed.append(line.error is not None)
        else:
            self.refused_lines.append(line_number(line.id) or 0)


class CustomIds:
    """A list of ``custom_id`` that keeps 16 bytes of each, to find repeated ids and ids that another list has.

    ::

        digests   16 bytes per id, in the order of ``add``; as an array (N, 2) of two 64-bit words
        order     positions sorted by the first word; of equal ids the first added comes first

    Among ten million different ids two have the same digest with a probability of about 1e-25.
    """

    def __init__(self) -> None:
        self._digests = bytearray()

    def __len__(self) -> int:
        return len(self._digests) // _DIGEST_BYTES

    def add(self, custom_id: str) -> None:
        self._digests += blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()

    def repeated(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions of ids that were added before, and for each of them the position of its first occurrence."""
        if not len(self):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        words = self._words()
        order = np.argsort(words[:, 0], kind="stable")
        sorted_words = words[order, 0]
        likely = np.flatnonzero(sorted_words[1:] == sorted_words[:-1]) + 1
        same = likely[words[order[likely], 1] == words[order[likely - 1], 1]]
        # A run of equal ids at places p, p + 1, p + 2 of the order: ``same`` has p + 1 and p + 2, the first is at p.
        run_starts = np.ones(len(same), dtype=bool)
        run_starts[1:] = same[1:] != same[:-1] + 1
        starts = np.maximum.accumulate(np.where(run_starts, same - 1, 0))
        return order[same], order[starts]

    def positions_in(self, others: CustomIds) -> npt.NDArray[np.int64]:
        """Return for each id its position in ``others``, or -1."""
        if not len(self) or not len(others):
            return np.full(len(self), -1, dtype=np.int64)
        words, other_words = self._words(), others._words()
        order = np.argsort(other_words[:, 0], kind="stable")
        places = np.searchsorted(other_words[order, 0], words[:, 0])
        found = order[np.minimum(places, len(order) - 1)]
        is_there = (other_words[found] == words).all(axis=1)
        return np.where(is_there, found, -1)

    def _words(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._digests, dtype=np.uint64).reshape(-1, 2)
