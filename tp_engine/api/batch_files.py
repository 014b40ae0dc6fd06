"""The batch job's files: requests are read as they are needed, results written one whole line at a time.

The output file is the job's only memory.  A process that is killed leaves whole lines and at most one torn line at the
end; a re-run cuts the torn line off and skips what the whole lines tell of.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tp_engine.api.batch_lines import ResultLine
from tp_engine.errors import ConfigError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Finished:
    """What earlier runs wrote: ``custom_ids`` of requests, and ``line_ids`` of these and of lines that were none."""

    custom_ids: set[str] = field(default_factory=set)
    line_ids: set[str] = field(default_factory=set)

    def add(self, line: ResultLine) -> None:
        """Remember one result; the refusal of a duplicate says nothing of the request that came first."""
        self.line_ids.add(line.id)
        if line.response is not None and line.custom_id is not None:
            self.custom_ids.add(line.custom_id)


def read_requests(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, text) of every line that is not blank; the file is never held as a whole."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            text = line.removeprefix(_BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
            if text:
                yield number, text


class ResultFile:
    """The output file, opened to go on after its last whole line, and locked against a second job."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock(path)
            self.finished = self._resume(path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, line: ResultLine) -> None:
        """Append one line with one call, so that a kill tears at most the last."""
        data = line.encode()
        written = os.write(self._descriptor, data)
        while written < len(data):  # a nearly full disk, or a signal
            written += os.write(self._descriptor, data[written:])

    def close(self) -> None:
        """Make sure that the results are on the disk."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"output_file is {str(path)!r}, which another job is writing; wait for it") from None

    def _resume(self, path: Path) -> Finished:
        """Read what is there and cut off a torn last line."""
        finished = Finished()
        whole_bytes = 0
        with path.open("rb") as stream:
            for number, text in enumerate(stream, start=1):
                if not text.endswith(b"\n"):
                    break
                finished.add(_result(path, number, text))
                whole_bytes += len(text)
        os.ftruncate(self._descriptor, whole_bytes)
        return finished


def _result(path: Path, number: int, text: bytes) -> ResultLine:
    try:
        return msgspec.json.decode(text, type=ResultLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"output_file is {str(path)!r}, whose line {number} is no batch result ({error}); give another file"
        ) from None
