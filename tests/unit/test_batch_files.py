"""Batch files: reading requests, writing results, going on after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tp_engine.api.batch_config import BatchConfig
from tp_engine.api.batch_files import ResultFile, read_requests
from tp_engine.api.batch_lines import BatchRequest, LineError, bad_line, read_line
from tp_engine.api.openai_protocol import ChatBody
from tp_engine.errors import ConfigError, RequestError


def line(**changes: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(fields | changes).encode()


def test_a_request_line_is_read() -> None:
    """Oracle: the written fields; unknown ones are ignored."""
    request = read_line(3, line(extra=1))
    assert (request.line_id, request.custom_id, request.url) == ("batch_req_3", "a", "/v1/chat/completions")
    assert isinstance(request.parse(), ChatBody)


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        line(custom_id=""),
        line(custom_id=7),
        line(method="GET"),
        line(url="/v1/embeddings"),
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}',
    ],
)
def test_lines_that_are_no_request(text: bytes) -> None:
    """Oracle: ``LineError`` and nothing else, and a result line that names the code."""
    with pytest.raises(LineError) as caught:
        read_line(4, text)
    result = bad_line(4, text, caught.value)
    assert result.response is None and result.error is not None and result.error["code"] == "invalid_line"
    assert result.id == "batch_req_4"
    json.loads(result.encode())


@pytest.mark.parametrize("body", [3, {}, {"messages": []}, {"messages": [{"role": "user"}], "stream": True}])
def test_bodies_that_are_refused(body: Any) -> None:
    """Oracle: the answer that the server would give, in the result's response and error."""
    request = read_line(1, line(body=body))
    with pytest.raises(RequestError) as caught:
        request.parse()
    result = request.failure(caught.value)
    assert result.custom_id == "a" and result.response is not None and result.error is not None
    assert result.response["status_code"] == 400
    assert result.response["body"]["error"]["message"] == result.error["message"] == str(caught.value)


def test_blank_lines_and_a_byte_order_mark_are_no_requests(tmp_path: Path) -> None:
    """Oracle: the line numbers of an editor."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{1}\r\n\n  \n{2}")
    assert list(read_requests(path)) == [(1, b"{1}"), (4, b"{2}")]


def written(path: Path, *numbers: int) -> list[bytes]:
    """Write one result per number and return the file's lines."""
    results = ResultFile(path)
    for number in numbers:
        results.write(BatchRequest(f"batch_req_{number}", f"id-{number}", "/v1/completions", b"{}").result(200, {}))
    results.close()
    return path.read_bytes().splitlines(keepends=True)


def test_every_possible_kill_is_resumed(tmp_path: Path) -> None:
    """Oracle: after a cut at any byte, exactly the whole lines are kept and known."""
    path = tmp_path / "out.jsonl"
    lines = written(path, 1, 2, 3)
    whole = b"".join(lines)
    for num_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:num_bytes])
        results = ResultFile(path)
        num_lines = whole[:num_bytes].count(b"\n")
        assert results.finished.custom_ids == {f"id-{number + 1}" for number in range(num_lines)}
        results.close()
        assert path.read_bytes() == b"".join(lines[:num_lines])


def test_refused_lines_do_not_finish_a_custom_id(tmp_path: Path) -> None:
    """Oracle: the refusal of a duplicate says nothing of the line it repeats."""
    path = tmp_path / "out.jsonl"
    results = ResultFile(path)
    results.write(bad_line(7, line(), LineError("repeated", "duplicate_custom_id")))
    results.close()
    again = ResultFile(path)
    assert again.finished.custom_ids == set() and again.finished.line_ids == {"batch_req_7"}
    again.close()


def test_a_file_is_written_by_one_job(tmp_path: Path) -> None:
    """Oracle: the second job is told who is in its way."""
    first = ResultFile(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="another job"):
        ResultFile(tmp_path / "out.jsonl")
    first.close()


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Oracle: the file's bytes, before and after."""
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1 is no batch result"):
        ResultFile(path)
    assert path.read_text() == "my notes\n"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({}, "--input-file"),
        ({"input_file": "none.jsonl", "output_file": "out.jsonl"}, "no such file"),
        ({"input_file": "in.jsonl", "output_file": "no/out.jsonl"}, "no folder"),
        ({"input_file": "in.jsonl", "output_file": "in.jsonl"}, "other than the input"),
    ],
)
def test_configuration_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, str], words: str
) -> None:
    """Oracle: the words that a user needs."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    with pytest.raises(ConfigError, match=words):
        BatchConfig(**names)
