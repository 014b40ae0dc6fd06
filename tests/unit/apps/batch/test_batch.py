"""What batch jobs answer, what they refuse, and what they leave undone."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import tp_engine
from tests.e2e.frontend import INFO
from tests.fake_engine import FakeEngine
from tests.panicking import PANIC_TEXT, panicking_model
from tests.services import FakeLLM
from tests.unit.apps.batch.jobs import ENGINE, ERRORS, NUM_LINES, check_all_there, completion, results_of, run
from tp_engine.api.batch_file import endpoints
from tp_engine.api.batch_file.lines import line_number
from tp_engine.api.input_processor import InputProcessor, load_tokenizer
from tp_engine.apps.batch import run as batch_run
from tp_engine.apps.batch.command import exit_code
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.apps.batch.run import run_job
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError, RequestError
from tp_engine.requests.request import FinishReason


def test_every_line_gets_its_result(
    llm: FakeLLM, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the fake engine repeats each prompt; each bad line has its own error code; nothing keeps running."""
    summary = run(source, tmp_path / "out.jsonl", summary_file=str(tmp_path / "summary.json"))
    check_all_there(tmp_path / "out.jsonl")
    assert not llm.engine.has_unfinished and len(llm.outputs) == 0
    counts = (summary.num_lines, summary.num_succeeded, summary.num_failed, summary.num_earlier, summary.num_remaining)
    assert counts == (NUM_LINES, NUM_LINES - 5, 5, 0, 0)
    assert summary.status == "completed" and summary.errors["invalid_request"] == summary.errors["model_not_found"] == 1
    answers = [result["response"]["body"] for result in results_of(tmp_path / "out.jsonl") if not result["error"]]
    assert summary.completion_tokens == sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert summary.prompt_tokens == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    reasons = [choice["finish_reason"] for answer in answers for choice in answer["choices"]]
    assert summary.finish_reasons == {reason: reasons.count(reason) for reason in set(reasons)}
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["num_failed"] == 5 and written["completion_tokens_per_s"] > 0
    assert exit_code(summary) == 3 and exit_code(summary, 0) == 0
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert exit_code(summary) == 0 and exit_code(summary, 3) == 3, "torchrun would call it a failed job"


def test_a_line_that_the_tokenizer_fails_over_is_an_error(llm: FakeLLM, tmp_path: Path) -> None:
    """Oracle: the other lines; a library's panic passes every ``except Exception``."""
    llm._async._input = InputProcessor(INFO, load_tokenizer(str(panicking_model(tmp_path / "model"))))
    lines = [completion(name, text) for name, text in (("a", "ab"), ("panic", PANIC_TEXT), ("b", "cd"))]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    summary = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (summary.num_succeeded, summary.num_failed, summary.status) == (2, 1, "completed")
    (error,) = [result["error"] for result in results_of(tmp_path / "out.jsonl") if result["error"]]
    assert "cannot be tokenized" in error["message"]


def test_all_endpoints(tmp_path: Path) -> None:
    """Oracle: the shapes of the three answers; the fake engine repeats the prompt."""
    message = {"messages": [{"role": "user", "content": "hi"}]}
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "hi"},
        "chat/completions": message,
        "responses": {"input": "hi"},
    }
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": f"/v1/{name}", "body": {**body, "model": "m"}})
        for name, body in bodies.items()
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    summary = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", served_model_name=("m",))
    assert (summary.num_succeeded, exit_code(summary)) == (3, 0)
    answers = {result["custom_id"]: result["response"]["body"] for result in results_of(tmp_path / "out.jsonl")}
    objects = {name: (answer["object"], answer["model"]) for name, answer in answers.items()}
    assert objects == {
        "completions": ("text_completion", "m"),
        "chat/completions": ("chat.completion", "m"),
        "responses": ("response", "m"),
    }
    assert answers["completions"]["choices"][0]["text"] == "hi"


def test_chat_and_sampling_options(llm: FakeLLM, tmp_path: Path) -> None:
    """Oracle: the prompt as the options' template renders it, which the fake engine repeats; the sampling
    parameters."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    options: dict[str, Any] = {
        "chat_template": "say {{ messages[0].content }}",
        "override_generation_config": '{"top_k": 7}',
    }
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)
    [result] = results_of(tmp_path / "out.jsonl")
    assert result["response"]["body"]["choices"][0]["message"]["content"] == "say hi"
    assert llm.engine.added[0].params.top_k == 7


def test_tool_calls_and_reasoning(tmp_path: Path) -> None:
    """Oracle: by hand; the engine repeats the prompt, here the user's message."""
    text = '<think>Hm.</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    body = {"messages": [{"role": "user", "content": text}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    chats: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    run(source, tmp_path / "out.jsonl", chat_template="{{ messages[0].content }}", **chats)
    choice = results_of(tmp_path / "out.jsonl")[0]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_beam_search(llm: FakeLLM, tmp_path: Path) -> None:
    """Oracle: the fake engine's candidates by hand: a prompt's first byte, then the next bytes, each less likely."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    beams = {"use_beam_search": True, "max_tokens": 2}
    lines = [
        completion("two", ["a", "k"], n=3, **beams),
        completion("plain", "xab"),
        completion("best", "p", n=1, best_of=3, **beams),
        completion("stop", "p", stop=["x"], **beams),
    ]
    source.write_text("\n".join(lines) + "\n")
    run(source, target)
    results = {result["custom_id"]: result["response"] for result in results_of(target)}
    texts = {name: [choice["text"] for choice in results[name]["body"]["choices"]] for name in ("two", "plain", "best")}
    assert texts == {"two": ["aa", "ab", "ba", "kk", "kl", "lk"], "plain": ["xab"], "best": ["pp"]}
    assert results["stop"]["status_code"] == 400 and results["stop"]["body"]["error"]["param"] == "stop"
    assert not llm.engine.has_unfinished and len(llm.outputs) == 0


@pytest.mark.parametrize("order", ["finished", "input"])
def test_order_of_results(source: Path, tmp_path: Path, order: str) -> None:
    """Oracle: the line numbers; without a requested order, short answers overtake long ones."""
    run(source, tmp_path / "out.jsonl", output_order=order, max_in_flight=6)
    check_all_there(tmp_path / "out.jsonl")
    numbers = [line_number(result["id"]) or 0 for result in results_of(tmp_path / "out.jsonl")]
    assert (numbers == sorted(numbers)) == (order == "input")


def test_errors_in_a_file_of_their_own(source: Path, tmp_path: Path) -> None:
    """Oracle: the same results, in two files; both files count when the job resumes."""
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    run(source, output, error_file=str(errors))
    check_all_there(output, errors)
    assert len(results_of(errors)) == 5 and not any(result["error"] for result in results_of(output))
    errors.unlink()
    again = run(source, output, error_file=str(errors))
    assert (again.num_earlier, again.num_failed) == (NUM_LINES - 5, 5)
    check_all_there(output, errors)


def test_shards_add_up(source: Path, tmp_path: Path) -> None:
    """Oracle: the whole file's results, for any number of shards; a repeated id counts across shards."""
    for count in (1, 2, 3, 7):
        paths = [tmp_path / f"out-{index}-{count}.jsonl" for index in range(1, count + 1)]
        summaries = [run(source, path, shard=f"{index}/{count}") for index, path in enumerate(paths, start=1)]
        check_all_there(*paths)
        assert sum(summary.num_lines for summary in summaries) == NUM_LINES


def test_a_finished_job_starts_no_engine(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the engine gets no request and no file is written, also when only bad lines are left."""
    run(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr(batch_run, "LLM", pytest.fail)
    again = run(source, tmp_path / "out.jsonl")
    assert (again.status, again.num_earlier, again.num_failed, exit_code(again)) == ("completed", NUM_LINES, 5, 3)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    source.write_text("\n".join(["", "{", "", completion("a", "x", model="other")]))
    only_errors = run(source, tmp_path / "errors.jsonl")
    assert (only_errors.num_lines, only_errors.num_failed) == (2, 2)
    assert [line_number(result["id"]) for result in results_of(tmp_path / "errors.jsonl")] == [2, 4]


def test_validation_runs_nothing(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the numbers of the bad lines, including the one that is too long for the model; no file appears."""
    monkeypatch.setattr(batch_run, "LLM", pytest.fail)
    before = set(source.parent.iterdir())
    monkeypatch.setattr(logging.getLogger("tp_engine"), "propagate", True)
    summary = run_job(ENGINE, BatchConfig(input_file=str(source), validate_only=True))
    assert (summary.status, summary.num_lines, summary.num_failed, exit_code(summary)) == ("validated", NUM_LINES, 5, 3)
    assert summary.errors == {code or "invalid_request": 1 for code in ERRORS.values()}
    for number in ERRORS:
        assert f"line {number}: " in caplog.text
    assert "repeats the custom_id of line 4" in caplog.text
    assert set(source.parent.iterdir()) == before


def test_strict_jobs_refuse_bad_files(llm: FakeLLM, source: Path, tmp_path: Path) -> None:
    """Oracle: the number of lines that are bad even without the tokenizer; no request and no result."""
    with pytest.raises(ConfigError, match=r"4 lines .* are bad"):
        run(source, tmp_path / "out.jsonl", strict=True, summary_file=str(tmp_path / "summary.json"))
    assert not llm.engine.added and (tmp_path / "out.jsonl").read_bytes() == b""
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_few_lines_are_in_flight(llm: FakeLLM, source: Path, tmp_path: Path) -> None:
    """Oracle: the bound on prompts; the last line may exceed it by its own prompts."""
    most, step, outputs = 0, llm.engine.step, llm.outputs

    def counting_step() -> Any:
        nonlocal most
        most = max(most, len(outputs))
        return step()

    llm.engine.step = counting_step  # type: ignore[method-assign]
    run(source, tmp_path / "out.jsonl", max_in_flight=4)
    assert 4 <= most <= 5


def test_lines_in_flight_take_few_bytes(llm: FakeLLM, tmp_path: Path) -> None:
    """Oracle: the bound, which pixels of images count against too; a line that is longer runs alone."""
    source, most, step = tmp_path / "in.jsonl", set[int](), llm.engine.step
    outputs = llm.outputs
    sizes = [16_000] * 12 + [90_000] + [16_000] * 3
    texts = [completion(f"id-{number}", "x", user="p" * size) for number, size in enumerate(sizes)]
    source.write_text("\n".join(texts) + "\n")

    def counting_step() -> Any:
        most.add(len(outputs))
        return step()

    llm.engine.step = counting_step  # type: ignore[method-assign]
    engine = dataclasses.replace(ENGINE, mm_transport_bytes=3 * 16_200)
    summary = run_job(engine, BatchConfig(input_file=str(source), output_file=str(tmp_path / "out.jsonl")))
    assert summary.num_succeeded == len(sizes) and {1, 3} <= most <= {1, 2, 3}


@pytest.mark.parametrize("order", ["finished", "input"])
def test_a_large_file_takes_little_memory(tmp_path: Path, order: str) -> None:
    """Oracle: tracemalloc's peak, far below the size of the input and of the output."""
    source, target, padding = tmp_path / "in.jsonl", tmp_path / "out.jsonl", "p" * 16_000
    with source.open("w") as lines:
        for number in range(640):
            lines.write(completion(f"id-{number}", "x", max_tokens=2 + number % 3, user=padding) + "\n")
    run(source, tmp_path / "warm-up.jsonl", shard="1/320")
    tracemalloc.start()
    try:
        summary = run(source, target, output_order=order, max_in_flight=8)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.stat().st_size > 10_000_000 and summary.num_succeeded == 640
    assert peak_bytes < 2_500_000


@pytest.mark.parametrize(("text", "num_lines"), [("", 0), ("\n\n", 0), ("{\n[]", 2)])
def test_files_without_a_request(tmp_path: Path, text: str, num_lines: int) -> None:
    """Oracle: the number of lines that are not blank, each with its error."""
    (tmp_path / "in.jsonl").write_text(text)
    summary = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (summary.status, summary.num_lines, summary.num_failed) == ("completed", num_lines, num_lines)
    assert len(results_of(tmp_path / "out.jsonl")) == num_lines


def test_lines_that_the_engine_fails_or_refuses(llm: FakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an error in one line is that line's result (500, 400, 500); the other lines are answered."""
    finish, add, prepare = FakeEngine.step, llm.engine.add_request, endpoints.prepare_request

    def step(engine: FakeEngine) -> Any:
        output = finish(engine)
        for delta in output.deltas:
            if delta.finish_reason and delta.request_id in broken:
                delta.finish_reason, delta.error = FinishReason.ERROR, "rank 0 has found NaN"
        return output

    broken: set[str] = set()

    def add_request(request: Any) -> None:
        prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < 256)
        if prompt == b"two":
            raise RequestError("it can never fit", code="context_length_exceeded")
        if prompt == b"nan":
            broken.add(request.request_id)
        add(request)

    def prepare_request(request: Any, *arguments: Any) -> Any:
        if request.custom_id == "bug":
            raise KeyError("bug")
        return prepare(request, *arguments)

    monkeypatch.setattr(FakeEngine, "step", step)
    monkeypatch.setattr(batch_run, "prepare_request", prepare_request)
    llm.engine.add_request = add_request  # type: ignore[method-assign]
    prompts = {"nan": ["one", "nan"], "fits": ["one", "two"], "bug": "one", "good": "one"}
    (tmp_path / "in.jsonl").write_text("\n".join(completion(name, prompt) for name, prompt in prompts.items()))
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    results = {result["custom_id"]: result for result in results_of(tmp_path / "out.jsonl")}
    statuses = {name: result["response"]["status_code"] for name, result in results.items()}
    assert statuses == {"nan": 500, "fits": 400, "bug": 500, "good": 200}
    codes = [results[name]["error"]["code"] for name in ("nan", "fits", "bug")]
    assert codes == ["generation_failed", "context_length_exceeded", "internal_error"]
    assert not llm.engine.has_unfinished and len(llm.outputs) == 0


def test_standard_streams(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the results of the same job with files."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    with source.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        run_job(ENGINE, BatchConfig(input_file="-", output_file="-"))
    (tmp_path / "out.jsonl").write_bytes(written.getvalue())
    check_all_there(tmp_path / "out.jsonl")


def test_the_python_api(source: Path, tmp_path: Path) -> None:
    """Oracle: options of the engine and of the job each arrive; the error for an unknown one names the nearest
    option."""
    summary = tp_engine.run_batch(source, tmp_path / "out.jsonl", device="cpu", max_num_seqs=4, output_order="input")
    assert isinstance(summary, tp_engine.BatchSummary) and summary.num_lines == NUM_LINES
    with pytest.raises(ConfigError, match="did you mean output_order"):
        tp_engine.run_batch(source, tmp_path / "out.jsonl", output_ordr="input")  # type: ignore[call-arg]


def test_the_fake_engine_has_the_demo_models_names() -> None:
    """Oracle: the demo model, which the jobs above take for granted."""
    assert os.path.samefile(INFO.model, EngineConfig().model)
