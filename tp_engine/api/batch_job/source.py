"""The input of a job: the lines of a file, a gzipped file, a pipe or standard input, read twice."""

import gzip
import os
import select
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tp_engine.api.batch_job.config import STANDARD_STREAM
from tp_engine.closing import Closing
from tp_engine.errors import ConfigError
from tp_engine.files import open_regular

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_POLL_S = 0.2
_PIECE_BYTES = 1 << 20


class BatchInput(Closing):
    """The input of one job; it stays open, so that both passes read the same file.

    Standard input, or another pipe, is first copied to a nameless file in ``spool_folder`` (default: the system's
    folder for temporary files); ``is_whole`` is False if a stop was requested meanwhile.
    """

    def __init__(
        self,
        input_file: str,
        *,
        max_line_bytes: int,
        spool_folder: Path | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = input_file
        self._max_line_bytes = max_line_bytes
        self.is_whole = True
        if input_file != STANDARD_STREAM and Path(input_file).is_file():
            self._file: IO[bytes] = open_regular(Path(input_file))
        else:
            self._file = tempfile.TemporaryFile(dir=spool_folder)  # noqa: SIM115 (closed by ``close``)
            if input_file == STANDARD_STREAM:
                self.is_whole = _copy(sys.stdin.fileno(), self._file, stop_requested)
            else:
                pipe = os.open(input_file, os.O_RDONLY | os.O_NONBLOCK)  # else it waits here for a writer
                try:
                    self.is_whole = _copy(pipe, self._file, stop_requested)
                finally:
                    os.close(pipe)
            self._file.seek(0)
        self._is_gzip = self._file.read(2) == _GZIP_MAGIC

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """(line number, text) of every line that is not blank; the text of a line that is too long is None, not read.

        One iteration at a time.  Raises ``ConfigError`` for a gzipped file that is damaged.
        """
        self._file.seek(0)
        if not self._is_gzip:
            yield from self._lines_of(self._file)
            return
        with gzip.GzipFile(fileobj=self._file, mode="rb") as unzipped:
            yield from self._lines_of(unzipped)

    def close(self) -> None:
        """Close the file; the copy of a pipe is deleted."""
        self._file.close()

    def _lines_of(self, stream: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, bytes | None]]:
        number, limit = 0, self._max_line_bytes
        while line := self._read(stream, limit + 2, number):  # with its end, \n or \r\n
            number += 1
            whole = line.removeprefix(_BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
            if len(line) == limit + 2 and not line.endswith(b"\n"):
                self._skip_line(stream, number)
                yield number, None
            elif len(whole) > limit:
                yield number, None
            elif whole:
                yield number, whole

    def _skip_line(self, stream: IO[bytes] | gzip.GzipFile, number: int) -> None:
        while (piece := self._read(stream, _PIECE_BYTES, number)) and not piece.endswith(b"\n"):
            pass

    def _read(self, stream: IO[bytes] | gzip.GzipFile, limit: int, number: int) -> bytes:
        if not self._is_gzip:
            return stream.readline(limit)
        try:
            return stream.readline(limit)
        except (EOFError, OSError, zlib.error) as error:
            raise ConfigError(
                f"input_file is {self._name!r}, a gzipped file that is damaged after line {number} ({error}); create "
                "it again"
            ) from None


def _copy(descriptor: int, target: IO[bytes], stop_requested: Callable[[], bool]) -> bool:
    """Copy up to the end of the pipe; False if a stop was requested before that."""
    while not stop_requested():
        readable, _, _ = select.select([descriptor], [], [], _POLL_S)
        if readable and not (piece := os.read(descriptor, _PIECE_BYTES)):
            return True
        if readable:
            target.write(piece)
    return False
