"""The lines of a batch: all are checked before any is run; those with a result are not run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.api.batch_file.lines import BatchInput, BatchRequest, LineError, read_line, repeated_line
from tp_engine.api.batch_file.results import EarlierResults, digest
from tp_engine.api.batches.objects import MAX_LINES

_MAX_ERRORS = 100
_GZIP = b"\x1f\x8b"


def check_lines(path: Path, endpoint: str, max_line_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """The number of requests in a file, and what is wrong with its lines; only the first faults are listed."""
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
    """Yield the requests of a file that ``check_lines`` has accepted, without those in ``earlier``."""
    for number, text in source.lines():
        request = read_line(number, text, (endpoint,))
        if digest(request.custom_id) not in earlier.answered:
            yield request


def count_results(output: Path, errors: Path) -> tuple[int, int, str | None, dict[str, Any]]:
    """The number of answers and of errors, the model that answered, and the answers' tokens as a ``usage``."""
    model, num_answers, counts = None, 0, Counter[str]()
    with output.open("rb") as stream:
        for line in stream:
            num_answers += 1
            body = msgspec.json.decode(line)["response"]["body"]
            model = body.get("model") or model
            counts.update(_token_counts(body.get("usage") or {}))
    with errors.open("rb") as stream:
        num_errors = sum(1 for _ in stream)
    usage = {
        "input_tokens": counts["input"],
        "input_tokens_details": {"cached_tokens": counts["cached"]},
        "output_tokens": counts["output"],
        "output_tokens_details": {"reasoning_tokens": counts["reasoning"]},
        "total_tokens": counts["input"] + counts["output"],
    }
    return num_answers, num_errors, model, usage


def _token_counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """The counts of one answer, by the names of chats, responses or messages; the last counts cached tokens apart."""
    details = {**_details(usage, "prompt_tokens"), **_details(usage, "input_tokens")}
    written = {**_details(usage, "completion_tokens"), **_details(usage, "output_tokens")}
    apart = usage.get("cache_read_input_tokens") or 0
    return {
        "input": usage.get("prompt_tokens", 0) + usage.get("input_tokens", 0) + apart,
        "cached": (details.get("cached_tokens") or 0) + apart,
        "output": usage.get("completion_tokens", 0) + usage.get("output_tokens", 0),
        "reasoning": written.get("reasoning_tokens") or written.get("thinking_tokens") or 0,
    }


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return usage.get(f"{name}_details") or {}
