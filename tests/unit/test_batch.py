"""The batch job against an engine without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.e2e.frontend import INFO, new_engine
from tp_engine.api.batch import BatchJob
from tp_engine.api.batch_files import ResultFile, read_requests
from tp_engine.api.input_processor import InputProcessor, load_tokenizer
from tp_engine.api.llm import LLM
from tp_engine.api.output_processor import OutputProcessor

NUM_LINES = 40


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(INFO.tokenizer)


@pytest.fixture
def llm(tokenizer: Any) -> Any:
    """What the job uses of ``LLM``: a fresh fake engine between the real processors."""
    return SimpleNamespace(
        engine=new_engine(),
        input_processor=InputProcessor(INFO, tokenizer),
        output_processor=OutputProcessor(tokenizer),
    )


def completion(custom_id: Any, prompt: Any, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 50, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def run(
    llm: Any, source: Path, target: Path, stop: Callable[[], bool] = lambda: False, max_in_flight: int = 8
) -> BatchJob:
    results = ResultFile(target)
    job = BatchJob(cast(LLM, llm), results, max_in_flight=max_in_flight)
    job.run(read_requests(source), stop)
    results.close()
    return job


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Good lines of different lengths, with bad ones among them."""
    lines = [completion(f"id-{number}", "x" + "ab" * (number % 7)) for number in range(NUM_LINES)]
    lines[5] = "not json"
    lines[9] = completion("id-3", "twice")
    lines[11] = completion("id-11", "x", temperature=-1)
    lines[13] = completion("id-13", ["one", "two two"], n=2, stop=[" "])
    lines[17] = completion("id-17", "x" * 2000)
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def check_all_there(path: Path) -> None:
    """Every line has exactly one result, and the right one."""
    results = {result["id"]: result for result in results_of(path)}
    assert len(results) == len(results_of(path)) == NUM_LINES
    errors = {line_id: result["error"]["code"] for line_id, result in results.items() if result["error"]}
    assert errors == {
        "batch_req_6": "invalid_line",
        "batch_req_10": "duplicate_custom_id",
        "batch_req_12": None,
        "batch_req_18": "context_length_exceeded",
    }
    assert results["batch_req_12"]["response"]["status_code"] == 400
    assert results["batch_req_6"]["response"] is None
    for number in range(NUM_LINES):
        result = results[f"batch_req_{number + 1}"]
        if number not in (5, 9, 11, 13, 17):
            assert result["custom_id"] == f"id-{number}" and result["response"]["status_code"] == 200
            text = result["response"]["body"]["choices"][0]["text"]
            assert text == ("x" + "ab" * (number % 7) if number % 7 else "x" * 50)
    choices = results["batch_req_14"]["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]


def test_every_line_gets_its_result(llm: Any, source: Path, tmp_path: Path) -> None:
    """Oracle: the fake engine repeats each prompt; bad lines are told apart by their codes; nothing keeps running."""
    job = run(llm, source, tmp_path / "out.jsonl")
    assert (job.num_done, job.num_failed, job.num_skipped) == (NUM_LINES - 4, 4, 0)
    check_all_there(tmp_path / "out.jsonl")
    assert not llm.engine.has_unfinished and len(llm.output_processor) == 0


def test_beam_search(llm: Any, tmp_path: Path) -> None:
    """Oracle: the fake engine's candidates by hand: a prompt's first byte, then those after it, less likely each."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    beams = {"use_beam_search": True, "max_tokens": 2}
    lines = [
        completion("two", ["a", "k"], n=3, **beams),
        completion("plain", "xab"),
        completion("best", "p", n=1, best_of=3, **beams),
        completion("stop", "p", stop=["x"], **beams),
    ]
    source.write_text("\n".join(lines) + "\n")
    run(llm, source, target)
    results = {result["custom_id"]: result["response"] for result in results_of(target)}
    texts = {name: [choice["text"] for choice in results[name]["body"]["choices"]] for name in ("two", "plain", "best")}
    assert texts == {"two": ["aa", "ab", "ba", "kk", "kl", "lk"], "plain": ["xab"], "best": ["pp"]}
    assert results["stop"]["status_code"] == 400 and results["stop"]["body"]["error"]["param"] == "stop"
    assert not llm.engine.has_unfinished and len(llm.output_processor) == 0


def test_few_lines_are_in_flight(llm: Any, source: Path, tmp_path: Path) -> None:
    """Oracle: the bound on prompts, with one line's prompts above it."""
    most = 0
    step = llm.engine.step

    def counting_step() -> Any:
        nonlocal most
        most = max(most, len(llm.output_processor))
        return step()

    llm.engine.step = counting_step
    run(llm, source, tmp_path / "out.jsonl", max_in_flight=4)
    assert 4 <= most <= 5


@pytest.mark.parametrize("num_results", [1, 7, 20, 33])
@pytest.mark.parametrize("torn_bytes", [0, 1, 40])
def test_a_killed_job_is_resumed(llm: Any, source: Path, tmp_path: Path, num_results: int, torn_bytes: int) -> None:
    """Oracle: a first run whose file was cut anywhere, and a second one, together give each result once."""
    whole = tmp_path / "whole.jsonl"
    run(llm, source, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"".join(lines[:num_results]) + lines[num_results][:torn_bytes])
    job = run(llm, source, target)
    assert job.num_skipped == num_results
    check_all_there(target)
    assert run(llm, source, target).num_skipped == NUM_LINES


def test_an_interrupted_job_says_so_and_is_resumed(llm: Any, source: Path, tmp_path: Path) -> None:
    """Oracle: the results so far are whole lines; the rest comes with the next run of a fresh engine."""
    target = tmp_path / "out.jsonl"
    job = run(llm, source, target, stop=lambda: llm.engine.num_steps >= 30)
    assert "run the same command" in job.summary(complete=False)
    num_results = len(results_of(target))
    assert 0 < num_results < NUM_LINES
    fresh = SimpleNamespace(
        engine=new_engine(),
        input_processor=llm.input_processor,
        output_processor=OutputProcessor(llm.input_processor.tokenizer),
    )
    assert run(fresh, source, target).num_skipped == num_results
    check_all_there(target)
