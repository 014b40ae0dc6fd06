"""Lines of OpenAI batch files.

A request line is ``{"custom_id", "method", "url", "body"}``, a result line ``{"id", "custom_id", "response", "error"}``
whose ``response`` is null for a line that is no request at all.  Results are matched to requests by ``custom_id``;
``id`` holds the number of the request's line, which tells lines without a usable ``custom_id`` apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tp_engine.api.openai_errors import describe_error
from tp_engine.api.openai_protocol import ChatBody, CompletionBody, parse_body
from tp_engine.errors import RequestError

ENDPOINTS: Mapping[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}


class LineError(ValueError):
    """A line that is no request at all."""

    def __init__(self, message: str, code: str = "invalid_line") -> None:
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
        """The line with its end."""
        return msgspec.json.encode(self) + b"\n"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A readable line; ``body`` is checked JSON text that ``parse`` turns into a request."""

    line_id: str
    custom_id: str
    url: str
    raw_body: bytes

    def parse(self) -> ChatBody | CompletionBody:
        """The body as the server would read it; raises ``RequestError``."""
        body = parse_body(ENDPOINTS[self.url], self.raw_body)
        if body.stream:
            raise RequestError("stream is true; a batch has no streams, leave it out", param="stream")
        return body

    def result(self, status: int, body: dict[str, Any]) -> ResultLine:
        """What became of it; an answer other than 200 is repeated as the line's error."""
        error = None if status == 200 else {key: body["error"][key] for key in ("code", "message", "param")}
        response = {"status_code": status, "request_id": self.line_id, "body": body}
        return ResultLine(self.line_id, self.custom_id, response, error)

    def failure(self, error: Exception) -> ResultLine:
        """The result of a request that was refused or failed."""
        return self.result(*describe_error(error))


def line_id(number: int) -> str:
    """The ``id`` of the result of line ``number``, counted from 1."""
    return f"batch_req_{number}"


def read_line(number: int, text: bytes) -> BatchRequest:
    """One line of the input; raises ``LineError``."""
    try:
        line = msgspec.json.decode(text, type=_RequestLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(f"line {number} is not a batch request: {error}") from None
    if not line.custom_id:
        raise LineError(f"line {number} has an empty custom_id")
    if line.method != "POST":
        raise LineError(f"line {number} has the method {line.method!r}; it must be POST")
    if line.url not in ENDPOINTS:
        raise LineError(f"line {number} has the url {line.url!r}; it must be one of {', '.join(ENDPOINTS)}")
    return BatchRequest(line_id(number), line.custom_id, line.url, bytes(line.body))


def bad_line(number: int, text: bytes, error: LineError) -> ResultLine:
    """The result of a line that is no request, with its ``custom_id`` if that much can be read."""
    return ResultLine(
        line_id(number), readable_custom_id(text), None, {"code": error.code, "message": str(error), "param": None}
    )


def readable_custom_id(text: bytes) -> str | None:
    """The ``custom_id`` of a line that may be otherwise unusable."""
    try:
        line = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    return custom_id if isinstance(custom_id, str) else None
