"""Lines of OpenAI batch files.

A request line is ``{"custom_id", "method", "url", "body"}``, a result line ``{"id", "custom_id", "response", "error"}``
whose ``response`` is null for a line that is not a request.  Results belong to requests with the same ``custom_id``;
``id`` holds the number of the request's line, which identifies lines without a usable ``custom_id``.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from tp_engine.api.openai.errors import describe_error

_LINE_ID = "batch_req_"
_LINE_ID_NUMBER = re.compile(_LINE_ID + r"([1-9]\d{0,17})")


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
        """Return the line with its line end."""
        return msgspec.json.encode(self) + b"\n"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A readable line; its endpoint parses ``raw_body``, which is JSON text."""

    line_id: str
    custom_id: str
    url: str
    raw_body: bytes

    def result(self, status: int, body: dict[str, Any]) -> ResultLine:
        """Return the line's result; if ``status`` is not 200, the error in ``body`` is also the line's error."""
        error = None if status == 200 else {key: body["error"][key] for key in ("code", "message", "param")}
        response = {"status_code": status, "request_id": self.line_id, "body": body}
        return ResultLine(self.line_id, self.custom_id, response, error)

    def failure(self, error: Exception) -> ResultLine:
        """Return the result of a request that was refused or failed."""
        return self.result(*describe_error(error))


def line_id(number: int) -> str:
    """Return the ``id`` of the result of line ``number``, counted from 1."""
    return f"{_LINE_ID}{number}"


def line_number(result_id: str) -> int | None:
    """Return the inverse of ``line_id``; None for any other text."""
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
    """Return the error of a line that has the ``custom_id`` of line ``first``."""
    return LineError(f"line {number} repeats the custom_id of line {first}; give each its own", "duplicate_custom_id")


def problem_code(error: Exception) -> str:
    """Return the kind of a line's problem: the code of ``error``, if it has one."""
    return getattr(error, "code", None) or describe_error(error)[1]["error"]["code"] or "invalid_request"


def bad_line(number: int, text: bytes | None, error: LineError) -> ResultLine:
    """Return the result of a line that is not a request, with its ``custom_id`` if that can be read."""
    return ResultLine(
        line_id(number),
        readable_custom_id(text),
        None,
        {"code": error.code, "message": str(error), "param": None, "line": number},
    )


def readable_custom_id(text: bytes | None) -> str | None:
    """Return the ``custom_id`` of a line; None if it has no readable one."""
    try:
        line = msgspec.json.decode(text or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    return custom_id if isinstance(custom_id, str) else None
