"""OpenAI-shaped errors: ``{"error": {"message", "type", "param", "code"}}``, over HTTP and in batch lines."""

from collections.abc import Mapping
from typing import Any

from tp_engine.errors import CODE_UNAVAILABLE, NO_TOKEN_LEFT, EngineDeadError, RequestError
from tp_engine.requests.structured_outputs import PARAM

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
LONGEST_MESSAGE = 4096
"""Characters: templates and libraries repeat what a client has sent, which may be megabytes."""
_STATUS_OF_CODE = {"model_not_found": 404, CODE_UNAVAILABLE: 503}


class HttpError(Exception):
    """An answer other than 200 that is not due to a request's content; ``retry_after_s`` becomes a header."""

    def __init__(self, status: int, message: str, *, code: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """``error`` with its field, or the list with its field, named as in the client's body, if ``names`` has another
    name for it."""
    ours, text = error.param or "", str(error)
    name, bracket, place = ours.partition("[")
    theirs = names.get(name)
    if theirs is None:
        return error
    theirs += bracket + place
    if text.startswith(ours):
        text = theirs + text[len(ours) :]
    return RequestError(text, param=theirs, code=error.code)


def sequence_error(error: str, code: str | None) -> RequestError | HttpError:
    """The exception for a sequence that ended with ``error``; with a ``code``, its own fields are the cause."""
    if code is None:
        return HttpError(500, error, code="generation_failed")
    return RequestError(error, param=None if code == NO_TOKEN_LEFT else PARAM, code=code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer with ``status``; a message that is too long is cut."""
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + "..."
    return {
        "error": {"message": message, "type": ERROR_TYPES.get(status, "server_error"), "param": param, "code": code}
    }


def describe_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an exception of a request; unexpected errors show no details."""
    if isinstance(error, RequestError):
        status = _STATUS_OF_CODE.get(error.code or "", 400)
        return status, error_body(status, str(error), param=error.param, code=error.code)
    if isinstance(error, HttpError):
        return error.status, error_body(error.status, str(error), code=error.code)
    if isinstance(error, TimeoutError):
        return 503, error_body(503, str(error) or "the engine did not answer in time", code="engine_busy")
    if isinstance(error, EngineDeadError):
        return 500, error_body(500, str(error), code="engine_dead")
    return 500, error_body(500, "internal error; the server's log has the details", code="internal_error")
