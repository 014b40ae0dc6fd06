"""The lines of a batch: all are checked before any is run; what has a result is not run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.api.batch_job.lines import BatchInput, BatchRequest, LineError, read_line, repeated_line
from tp_engine.api.batch_job.results import EarlierResults, digest
from tp_engine.api.batches.objects import MAX_LINES

_MAX_ERRORS = 100
_GZIP = b"\x1f\x8b"


def check_lines(path: Path, endpoint: str, max_line_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of requests in a file, and what is wrong with its lines; the first faults are enough."""
    seen: dict[str, int] = {}
    errors: list[dict[str, Any]] = []
    with path.open("rb") as stream:
        is_compressed = stream.read(2) == _GZIP
    if is_compressed:  # a small file could hold lines for hours
        words = "the file is compressed; send plain lines"
        return 0, [{"code": "invalid_file", "line": None, "message": words, "param": None}]
    with BatchInput(str(path), max_line_bytes=max_line_bytes) as source:
        for number, text in source.lines():
            if len(errors) >= _MAX_ERRORS or len(seen) > MAX_LINES:
                break
            try:
                request = read_line(number, text, (endpoint,))
                if request.custom_id in seen:
                    raise repeated_line(number, seen[request.custom_id])
                seen[request.custom_id] = number
            except LineError as error:
                errors.append({"code": error.code, "line": number, "message": str(error), "param": None})
    if len(seen) > MAX_LINES:
        words = f"the file has more than {MAX_LINES} lines; send it in parts"
        errors.append({"code": "too_many_tasks", "line": None, "message": words, "param": None})
    if not seen and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "the file has no line", "param": None})
    return len(seen), errors


def open_requests(source: BatchInput, endpoint: str, earlier: EarlierResults) -> Iterator[BatchRequest]:
    """Yield the requests of a file that ``check_lines`` has found right, but for those that ``earlier`` has."""
    for number, text in source.lines():
        request = read_line(number, text, (endpoint,))
        if digest(request.custom_id) not in earlier.answered:
            yield request


def count_results(output: Path, errors: Path) -> tuple[int, int, str | None, dict[str, Any]]:
    """Return the number of answers and of errors, the model that answered, and the answers' tokens as a ``usage``."""
    model, num_answers, num_in, num_out = None, 0, 0, 0
    with output.open("rb") as stream:
        for line in stream:
            num_answers += 1
            body = msgspec.json.decode(line)["response"]["body"]
            model, counts = body.get("model") or model, body.get("usage") or {}
            num_in += counts.get("prompt_tokens", 0) + counts.get("input_tokens", 0)
            num_out += counts.get("completion_tokens", 0) + counts.get("output_tokens", 0)
    with errors.open("rb") as stream:
        num_errors = sum(1 for _ in stream)
    usage = {
        "input_tokens": num_in,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_out,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_in + num_out,
    }
    return num_answers, num_errors, model, usage
