"""Results of batch jobs: written line by line, read again after a kill, found among millions, put in order."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tp_engine.api.batch_file.lines import BatchRequest, LineError, ResultLine, bad_line, line_number
from tp_engine.api.batch_file.results import Results, digest
from tp_engine.apps.batch.second_pass import Outcomes, ReadAhead, Work, open_lines
from tp_engine.apps.batch.summary import BatchSummary
from tp_engine.apps.batch.survey import Survey
from tp_engine.errors import ConfigError, RequestError
from tp_engine.images.image_input import ImageInput


def request(number: int) -> BatchRequest:
    return BatchRequest(f"batch_req_{number}", f"id-{number}", "/v1/completions", b"{}")


def result(number: int) -> ResultLine:
    return request(number).result(200, {"text": "é" * number})


def known(results: Results, *custom_ids: str) -> list[bool]:
    return [digest(custom_id) in results.earlier.answered for custom_id in custom_ids]


def test_every_possible_kill_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: after a cut at any byte, exactly the whole lines are kept and known."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # a second per hundred
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        for number in (1, 2, 3):
            results.write(result(number))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for num_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:num_bytes])
        num_lines = whole[:num_bytes].count(b"\n")
        with Results(path) as results:
            assert known(results, "id-1", "id-2", "id-3") == [number <= num_lines for number in (1, 2, 3)]
        assert path.read_bytes() == b"".join(lines[:num_lines])


def test_errors_have_a_file_of_their_own(tmp_path: Path) -> None:
    """Oracle: the place of each line; both lines are known afterwards, with the one that failed."""
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    with Results(output, errors) as results:
        results.write(result(1))
        results.write(request(2).failure(RequestError("no", param="n")))
        results.write(bad_line(3, b"{", LineError("line 3 is bad", "invalid_json_line")))
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == ["batch_req_1"]
    assert [line_number(json.loads(line)["id"]) for line in errors.read_text().splitlines()] == [2, 3]
    with Results(output, errors) as again:
        assert known(again, "id-1", "id-2", "id-3") == [True, True, False]
        assert (list(again.earlier.answered.values()), again.earlier.refused) == ([False, True], {3})


def test_refused_lines_do_not_finish_a_custom_id(tmp_path: Path) -> None:
    """Oracle: the refusal of a duplicate does not count as a result of the line it repeats."""
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        results.write(bad_line(7, b'{"custom_id": "a"}', LineError("repeated", "duplicate_custom_id")))
    with Results(path) as again:
        assert known(again, "a") == [False] and again.earlier.refused == {7}


def test_a_file_is_written_by_one_job(tmp_path: Path) -> None:
    """Oracle: the error of the second job names the file and the other job."""
    with Results(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="another job"):
        Results(tmp_path / "out.jsonl")


NO_STATUS = b'{"id": "batch_req_1", "custom_id": "c", "response": {}, "error": null}\n'


@pytest.mark.parametrize("text", [b"my notes\n", b"my notes", b'{"ids": "of something else', b'["id"]\n', NO_STATUS])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: bytes) -> None:
    """Oracle: the file's bytes, before and after."""
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="line 1 that is not a batch result"):
        Results(path)
    assert path.read_bytes() == text


def test_a_tail_of_zeros_after_a_power_failure_is_cut_off(tmp_path: Path) -> None:
    """Oracle: the lines before it."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(result(1).encode() + bytes(4096))
    with Results(path) as results:
        assert known(results, "id-1") == [True]
    assert path.read_bytes() == result(1).encode()


def test_existing_results_are_refused_on_request(tmp_path: Path) -> None:
    """Oracle: an empty file is accepted; a file with results is refused and kept."""
    path = tmp_path / "out.jsonl"
    path.touch()
    with Results(path, resume=False) as results:
        results.write(result(1))
    with pytest.raises(ConfigError, match="has 1 results, and --no-resume"):
        Results(path, resume=False)
    assert path.read_bytes() == result(1).encode()


def test_a_full_disk_is_named_and_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a disk with room for 30 bytes; once it has more, the lines before the torn one are known."""
    path, write, room = tmp_path / "out.jsonl", os.write, 30

    def write_if_room(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[:room])
        room -= written
        return written

    with Results(path) as results:
        results.write(result(1))
        with monkeypatch.context() as full:
            full.setattr(os, "write", write_if_room)
            with pytest.raises(OSError, match=r"the same command continues.*out.jsonl"):
                results.write(result(2))
    assert len(path.read_bytes()) == len(result(1).encode()) + 30
    with Results(path) as again:
        assert known(again, "id-1", "id-2") == [True, False]
    assert path.read_bytes() == result(1).encode()


def test_results_reach_the_disk_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the times of fdatasync on the test's own clock: once per period, and only for new results."""
    clock, syncs = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: syncs.append(clock[0]))
    with Results(tmp_path / "out.jsonl") as results:
        for number, now_s in enumerate((101.0, 104.0, 106.0, 107.0, 200.0, 300.0)):
            clock[0] = now_s
            if number < 5:
                results.write(result(number))
            results.sync_if_due()
    assert syncs == [106.0, 200.0]


def outcomes(written: list[int], **options: Any) -> Outcomes:
    """Outcomes whose lines are counted in ``written`` in place of files."""
    places: Any = SimpleNamespace(write=lambda line: written.append(int(line.id)), sync_if_due=lambda: None)
    summary = BatchSummary(input_file="", output_file="", error_file=None, shard="1/1", num_lines=110, num_earlier=10)
    return Outcomes(places, summary, **{"keeps_order": False, "window": 5, "shows_progress": False, **options})


def test_progress_in_words(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: by hand: 10 of 110 lines were done before and 50 more in 100 s, so the other 50 take 100 s."""
    monkeypatch.setattr(logging.getLogger("tp_engine"), "propagate", True)
    caplog.set_level(logging.INFO, "tp_engine")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    shown = outcomes([], shows_progress=True)
    for number in range(50):
        clock[0] += 2.0
        shown.put(work(number))
    shown.close()
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("second_pass")]
    assert lines[-1].startswith("lines: 60 of 110 (55 %)") and "01:40 left" in lines[-1]
    assert 3 <= len(lines) <= 5, "one for each 30 s"


@pytest.mark.parametrize("seed", range(10))
def test_results_in_the_order_of_the_input(seed: int) -> None:
    """Oracle: 0, 1, 2, ... for any order of arrival, with at most a window of them under way."""
    rng, written, started, running = random.Random(seed), list[int](), 0, list[int]()
    order = outcomes(written, keeps_order=True)
    while started < 60 or running:
        while started < 60 and order.has_room(started) and rng.random() < 0.8:
            running.append(started)
            started += 1
        if running:
            order.put(work(running.pop(rng.randrange(len(running)))))
        assert started - len(written) <= 5
    assert written == list(range(60))
    as_they_come = outcomes(written)
    as_they_come.put(work(99))
    assert written[-1] == 99 and as_they_come.has_room(10**9)


def work(ordinal: int) -> Work:
    return Work(ordinal=ordinal, num_bytes=10, result=ResultLine(str(ordinal), None, {}, None))


def test_reading_ahead_is_bounded_and_in_order() -> None:
    """Oracle: the numbers, and how many the reader took from the iterator before the first request."""
    taken = 0

    def items() -> Iterator[Work]:
        nonlocal taken
        for taken in range(1, 101):
            yield work(taken)

    for bounds, most in (({"max_items": 7, "max_bytes": 10**6}, 8), ({"max_items": 100, "max_bytes": 35}, 5)):
        with ReadAhead(items(), **bounds) as ahead:
            time.sleep(0.05)
            assert taken <= most
            got = [item.ordinal for item in iter(lambda: ahead.get(5.0), None)]
            assert got == list(range(1, 101)) and ahead.exhausted


def test_images_of_a_line_count_what_their_pixels_take() -> None:
    """Oracle: the line's length, and 3 bytes for each pixel of the images of all its prompts."""

    def image(height: int, width: int) -> ImageInput:
        return ImageInput(
            start=0, num_tokens=1, grid=(1, 1), digest=bytes(32), pid=0, fd=0, offset=0, height=height, width=width
        )

    text = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}).encode()
    prompts = [SimpleNamespace(images=(image(10, 20), image(7, 3))), SimpleNamespace(images=())]
    source: Any = SimpleNamespace(lines=lambda: [(1, text)])
    survey = Survey(is_open=bytearray([1]))
    prepared: Any = SimpleNamespace(requests=prompts)
    (line,) = open_lines(source, survey, lambda request: prepared)
    assert line.prepared is prepared and line.num_bytes == len(text) + 3 * (200 + 21)


def test_reading_ahead_ends_early_and_with_errors() -> None:
    """Oracle: the thread has ended; an error arrives after the items before it."""

    def failing() -> Iterator[Work]:
        yield work(1)
        raise ConfigError("damaged")

    with ReadAhead(failing(), max_items=5, max_bytes=100) as ahead:
        first = ahead.get(5.0)
        assert first is not None and first.ordinal == 1
        with pytest.raises(ConfigError, match="damaged"):
            ahead.get(5.0)
    endless = ReadAhead((work(1) for _ in iter(int, 1)), max_items=5, max_bytes=100)
    endless.close()
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())
