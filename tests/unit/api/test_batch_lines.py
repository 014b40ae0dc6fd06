"""Batch files: lines in, lines out, and the options of the job."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tp_engine.api.batch_file.endpoints import ENDPOINTS, GrammarTrials, check_request
from tp_engine.api.batch_file.lines import BatchInput, LineError, bad_line, line_id, line_number, read_line
from tp_engine.apps.batch.config import BatchConfig, takes_line
from tp_engine.errors import ConfigError, RequestError

GRAMMARS = GrammarTrials(5.0)  # starts no process, as no line has a grammar
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": ["hi", "there"], "encoding_format": "base64"},
    "/v1/score": {"queries": "hi", "documents": ["a", "b"]},
    "/v1/rerank": {"query": "hi", "documents": ["a", {"text": "b"}], "top_n": 1},
}


def line(**changes: Any) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    return json.dumps(fields | changes).encode()


@pytest.mark.parametrize(("url", "body"), BODIES.items())
def test_a_request_line_is_read(url: str, body: Any) -> None:
    """Oracle: the written fields; unknown ones are ignored."""
    request = read_line(3, line(url=url, body=body, extra=1), ENDPOINTS)
    assert (line_number(request.line_id), request.custom_id, request.url) == (3, "a", url)
    check_request(request, ("m",), GRAMMARS)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b'"\\ud800"', "invalid_json_line"),
        (b'{"body": ' + b"[" * 100_000, "invalid_json_line"),
        (b"[" * 100_000, "invalid_type"),
        (None, "line_too_long"),
        (b"[]", "invalid_type"),
        (line(custom_id=7), "invalid_type"),
        (line(custom_id=""), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/audio/speech"), "invalid_url"),
        (line(url="/v2/rerank"), "invalid_url"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "missing_required_parameter"),
    ],
)
def test_lines_that_are_no_request(text: bytes | None, code: str) -> None:
    """Oracle: only ``LineError`` is raised, and the result line has OpenAI's fields and the line's number."""
    with pytest.raises(LineError) as caught:
        read_line(4, text, ENDPOINTS)
    result = bad_line(4, text, caught.value)
    assert result.response is None and result.error is not None and "line 4" in result.error["message"]
    assert (result.error["code"], result.error["line"], line_number(result.id)) == (code, 4, 4)
    json.loads(result.encode())


@pytest.mark.parametrize(
    ("url", "changes", "param"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"stream": True}, "stream"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"use_beam_search": True, "stop": "x"}, "stop"),
        ("/v1/responses", {"input": 3}, "input"),
        ("/v1/responses", {"top_p": 7}, "top_p"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"stream": True}, "stream"),
        ("/v1/score", {"text_1": "hi"}, "queries"),
        ("/v1/score", {"documents": []}, "documents"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": [{"title": "x"}]}, "documents"),
    ],
)
def test_bodies_that_are_refused(url: str, changes: dict[str, Any], param: str) -> None:
    """Oracle: the server's answer, in the result's response and error."""
    request = read_line(1, line(url=url, body=BODIES[url] | changes), ENDPOINTS)
    with pytest.raises(RequestError) as caught:
        check_request(request, ("m",), GRAMMARS)
    result = request.failure(caught.value)
    assert result.custom_id == "a" and result.response is not None and result.error is not None
    assert (result.response["status_code"], result.error["param"]) == (400, param)
    assert result.response["body"]["error"]["message"] == result.error["message"] == str(caught.value)


def test_a_line_for_another_model_is_refused() -> None:
    """Oracle: 404 as from the server, with the remedy."""
    request = read_line(1, line(body=CHAT | {"model": "gpt-4o"}), ENDPOINTS)
    check_request(request, ("m", "gpt-4o"), GRAMMARS)
    with pytest.raises(RequestError, match="--served-model-name") as caught:
        check_request(request, ("m",), GRAMMARS)
    response = request.failure(caught.value).response
    assert response is not None and response["status_code"] == 404


def test_ids_of_results_are_line_numbers() -> None:
    """Oracle: the inverse, also for ids of earlier versions; it finds no line number in other programs' ids.  No two
    are equal, so that results of several jobs can be put together."""
    assert len({line_id(1) for _ in range(100)}) == 100 and line_number("batch_req_7") == 7
    assert [line_number(line_id(number)) for number in (1, 10**12)] == [1, 10**12]
    assert [line_number(text) for text in ("", "vllm-3", "batch_req_", "batch_req_0", "batch_req_x")] == [None] * 5


def lines_of(path: Path | str, max_line_bytes: int = 100) -> list[tuple[int, bytes | None]]:
    with BatchInput(str(path), max_line_bytes=max_line_bytes) as source:
        first = list(source.lines())
        assert list(source.lines()) == first, "the second pass sees the same"
        return first


def test_lines_have_the_numbers_of_an_editor(tmp_path: Path) -> None:
    """Oracle: written here; blank lines, a byte order mark and either kind of line end."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{1}\r\n\n  \n{2}")
    assert lines_of(path) == [(1, b"{1}"), (4, b"{2}")]
    path.write_bytes(b"")
    assert lines_of(path) == []


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 9, 10, 11, 30])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_lines_that_are_too_long_are_not_held(tmp_path: Path, limit: int, end: bytes) -> None:
    """Oracle: the lengths, at and around every limit."""
    texts = [b"x" * length for length in (1, 9, 10, 11, 3000, 2, 10)]
    path = tmp_path / "in.jsonl"
    path.write_bytes((end or b"\n").join(texts) + end)
    expected = [(number, text if len(text) <= limit else None) for number, text in enumerate(texts, start=1)]
    assert lines_of(path, limit) == expected


def test_a_gzipped_file(tmp_path: Path) -> None:
    """Oracle: the plain text; the content shows the format, not the name; the error for a damaged file names the
    place."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(gzip.compress(b"{1}\n{2}\n"))
    assert lines_of(path) == [(1, b"{1}"), (2, b"{2}")]
    whole = gzip.compress(b"\n".join(str(number).encode() for number in range(5000)))
    for damaged in (whole[:-500], whole[:1000] + bytes(8) + whole[1008:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="damaged after line"):
            lines_of(path)


def test_standard_input_is_read_twice_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the text; the copy has no name in its folder."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b"{1}\n{2}"))
    with path.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        with BatchInput("-", max_line_bytes=100, spool_folder=tmp_path) as source:
            assert source.is_whole and list(source.lines()) == list(source.lines()) == [(1, b"{1}"), (2, b"{2}")]
            assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def test_waiting_for_standard_input_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the read of a silent pipe ends when it is asked to stop."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stream, os.fdopen(writer, "wb"):
        monkeypatch.setattr(sys, "stdin", stream)
        answers = iter([False, False, True])
        with BatchInput("-", max_line_bytes=100, stop_requested=lambda: next(answers)) as source:
            assert not source.is_whole


def test_a_named_pipe_is_read_like_standard_input(tmp_path: Path) -> None:
    """Oracle: the text that another thread writes into the pipe, once."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    BatchConfig(input_file=str(pipe), output_file="-")
    writer = threading.Thread(target=pipe.write_bytes, args=(b"{1}\n{2}",))
    writer.start()
    assert lines_of(pipe) == [(1, b"{1}"), (2, b"{2}")]
    writer.join(10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--input-file"),
        ({"input_file": "in.jsonl"}, "--output-file"),
        ({"input_file": "none.jsonl", "output_file": "out.jsonl"}, "no such file"),
        ({"input_file": "https://host/in.jsonl", "output_file": "out.jsonl"}, "use curl"),
        ({"input_file": "in.jsonl", "output_file": "no/out.jsonl"}, "no folder"),
        ({"input_file": "in.jsonl", "output_file": "."}, "not a regular file"),
        ({"input_file": "in.jsonl", "output_file": "/dev/null"}, "not a regular file"),
        ({"input_file": "in.jsonl", "output_file": "in.jsonl"}, "other than input_file"),
        ({"input_file": "in.jsonl", "output_file": "out", "error_file": "./out"}, "other than output_file"),
        ({"input_file": "in.jsonl", "output_file": "out.jsonl.gz"}, "compress them afterwards"),
        ({"input_file": "in.jsonl", "output_file": "out", "shard": "0/2"}, "from 1 to N"),
        ({"input_file": "in.jsonl", "output_file": "out", "shard": "3/2"}, "from 1 to N"),
        ({"input_file": "in.jsonl", "output_file": "out", "shard": "half"}, "I/N"),
        ({"input_file": "in.jsonl", "output_file": "out", "output_order": "random"}, "finished, input"),
        ({"input_file": "in.jsonl", "output_file": "out", "max_in_flight": 0}, "at least 1"),
        ({"input_file": "in.jsonl", "output_file": "out", "tool_call_parser": "own"}, "choose one of"),
        ({"input_file": "in.jsonl", "output_file": "out", "override_generation_config": "3"}, "JSON object"),
        ({"input_file": "in.jsonl", "output_file": "out", "served_model_name": ("",)}, "none of them empty"),
    ],
)
def test_configuration_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    """Oracle: the words in the error."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    with pytest.raises(ConfigError, match=words):
        BatchConfig(**options)


def test_shards_are_a_partition() -> None:
    """Oracle: exactly one of N shards takes each line number."""
    for count in range(1, 8):
        shards = [
            BatchConfig(input_file="-", output_file="-", shard=f"{i}/{count}").input_shard for i in range(1, count + 1)
        ]
        for number, shard in itertools.product(range(1, 50), shards):
            assert takes_line(shard, number) == ((number - 1) % count + 1 == shard[0])
