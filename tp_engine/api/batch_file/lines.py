"""Lines of OpenAI batch files, and the input that has them: a file, a gzipped file, a pipe or standard input.

A request line is ``{"custom_id", "method", "url", "body"}``, a result line ``{"id", "custom_id", "response", "error"}``
whose ``response`` is null for a line that is not a request.  Results belong to requests with the same ``custom_id``;
``id`` holds the number of the request's line, which identifies lines without a usable ``custom_id``, and random digits,
so that results of several files can be combined.
"""

import gzip
import os
import re
import secrets
import select
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from tp_engine.api.json_parts import json_parts
from tp_engine.api.openai.errors import describe_error
from tp_engine.errors import ConfigError
from tp_engine.system.closing import Closing
from tp_engine.system.files import open_regular

STANDARD_STREAM = "-"
_LINE_ID = "batch_req_"
_LINE_ID_NUMBER = re.compile(_LINE_ID + r"([1-9]\d{0,17})(?:_[0-9a-f]{24})?")  # earlier versions: the number alone
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_POLL_S = 0.2
_PIECE_BYTES = 1 << 20


class LineError(ValueError):
    """A line that is not a request; ``code`` says what is wrong, in the words of OpenAI's validation."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class _RequestLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class ResultLine(msgspec.Struct):
    """One line of the output file."""

    id: str
    custom_id: str | None
    response: dict[str, Any] | None
    error: dict[str, Any] | None

    def encode(self) -> bytes:
        """The line with its line end; may be called in any thread."""
        return b"".join((*json_parts(msgspec.structs.asdict(self)), b"\n"))


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A readable line; its endpoint parses ``raw_body``, which is JSON text."""

    line_id: str
    custom_id: str
    url: str
    raw_body: bytes

    def result(self, status: int, body: dict[str, Any]) -> ResultLine:
        """The line's result; if ``status`` is not 200, the error in ``body`` is also the line's error."""
        error = None if status == 200 else {key: body["error"][key] for key in ("code", "message", "param")}
        response = {"status_code": status, "request_id": self.line_id, "body": body}
        return ResultLine(self.line_id, self.custom_id, response, error)

    def failure(self, error: Exception) -> ResultLine:
        """The result of a request that was refused or failed."""
        return self.result(*describe_error(error))


def line_id(number: int) -> str:
    """A fresh ``id`` for the result of line ``number``, counted from 1."""
    return f"{_LINE_ID}{number}_{secrets.token_hex(12)}"


def line_number(result_id: str) -> int | None:
    """The line number in an id of ``line_id``; None for any other text."""
    match = _LINE_ID_NUMBER.fullmatch(result_id)
    return int(match[1]) if match else None


def read_line(number: int, text: bytes | None, urls: Collection[str]) -> BatchRequest:
    """Parse one line, None if it was too long; raises ``LineError`` unless it is a request to one of ``urls``."""
    if text is None:
        raise LineError(f"line {number} is longer than max_body_bytes; raise --max-body-bytes", "line_too_long")
    try:
        line = msgspec.json.decode(text, type=_RequestLine)
    except msgspec.ValidationError as error:
        raise LineError(
            f"line {number} is not a batch request: {error}",
            "missing_required_parameter" if "missing required" in str(error) else "invalid_type",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(f"line {number} is not valid JSON: {error}", "invalid_json_line") from None
    if not line.custom_id:
        raise LineError(f"line {number} has an empty custom_id", "invalid_custom_id")
    if line.method != "POST":
        raise LineError(f"line {number} has the method {line.method[:40]!r}; it must be POST", "invalid_method")
    if line.url not in urls:
        raise LineError(
            f"line {number} has the url {line.url[:200]!r}; it must be one of {', '.join(urls)}", "invalid_url"
        )
    return BatchRequest(line_id(number), line.custom_id, line.url, bytes(line.body))


def repeated_line(number: int, first: int) -> LineError:
    """The error of a line that has the ``custom_id`` of line ``first``."""
    return LineError(f"line {number} repeats the custom_id of line {first}; give each its own", "duplicate_custom_id")


def bad_line(number: int, text: bytes | None, error: LineError) -> ResultLine:
    """The result of a line that is not a request, with its ``custom_id`` if that can be read."""
    try:
        line = msgspec.json.decode(text or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        line = None
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    return ResultLine(
        line_id(number),
        custom_id if isinstance(custom_id, str) else None,
        None,
        {"code": error.code, "message": str(error), "param": None, "line": number},
    )


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
            return
        self._file = tempfile.TemporaryFile(dir=spool_folder)  # noqa: SIM115 (closed by ``close``)
        if input_file == STANDARD_STREAM:
            self.is_whole = _copy(sys.stdin.fileno(), self._file, stop_requested)
            return
        pipe = os.open(input_file, os.O_RDONLY | os.O_NONBLOCK)  # without the flag it waits for a writer
        try:
            self.is_whole = _copy(pipe, self._file, stop_requested)
        finally:
            os.close(pipe)

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """(line number, text) of every line that is not blank; the text of a line that is too long is None, not read.

        One iteration at a time.  Raises ``ConfigError`` for a gzipped file that is damaged.
        """
        self._file.seek(0)
        is_gzip = self._file.read(2) == _GZIP_MAGIC
        self._file.seek(0)
        stream = gzip.GzipFile(fileobj=self._file, mode="rb") if is_gzip else self._file
        number, limit = 0, self._max_line_bytes
        try:
            while line := stream.readline(limit + 2):  # with its end, \n or \r\n
                number += 1
                text = line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").strip()
                is_cut = len(line) == limit + 2 and not line.endswith(b"\n")
                piece = line
                while is_cut and piece and not piece.endswith(b"\n"):
                    piece = stream.readline(_PIECE_BYTES)
                if is_cut or text:
                    yield number, None if is_cut or len(text) > limit else text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(
                f"input_file is {self._name!r}, a gzipped file that is damaged after line {number} ({error}); create "
                "it again"
            ) from None

    def close(self) -> None:
        """Close the file; the copy of a pipe is deleted."""
        self._file.close()


def _copy(descriptor: int, target: IO[bytes], stop_requested: Callable[[], bool]) -> bool:
    """Copy up to the end of the pipe; False if a stop was requested before that."""
    while not stop_requested():
        readable, _, _ = select.select([descriptor], [], [], _POLL_S)
        if readable and not (piece := os.read(descriptor, _PIECE_BYTES)):
            return True
        if readable:
            target.write(piece)
    return False
