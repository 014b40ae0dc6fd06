"""Batch jobs that end early and resume where they stopped."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.frontend import new_engine, wait_until
from tests.fake_engine import FakeEngine
from tests.services import FakeLLM
from tests.unit.apps.batch.jobs import NUM_LINES, check_all_there, completion, results_of, run
from tp_engine.apps.batch import run as batch_run
from tp_engine.apps.batch.command import exit_code
from tp_engine.apps.batch.summary import BatchStatus


def in_a_child(source: Path, target: Path, options: dict[str, Any]) -> BaseProcess:
    """The job in a forked process, slow enough to be killed at any moment."""

    def job() -> None:
        with patch.object(batch_run, "LLM", lambda **_: FakeLLM(new_engine(0.001))):
            run(source, target, progress_bar=False, **options)

    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    return process


def kill_after(process: BaseProcess, target: Path, num_lines: int, delay_s: float) -> bool:
    """kill -9 ``delay_s`` after ``target`` has ``num_lines`` lines; False if the process had ended by then."""
    try:
        wait_until(lambda: not process.is_alive() or target.read_bytes().count(b"\n") >= num_lines, "results")
        time.sleep(delay_s)
        return process.is_alive()
    finally:
        process.kill()
        process.join(10)


@pytest.mark.parametrize(("order", "seed"), [("finished", 1), ("finished", 2), ("input", 3), ("input", 4)])
def test_jobs_that_are_killed_again_and_again(source: Path, tmp_path: Path, order: str, seed: int) -> None:
    """Oracle: after kill -9 at random moments, every line has one result in the end, the right one."""
    rng, target = random.Random(seed), tmp_path / "out.jsonl"
    options: dict[str, Any] = {"output_order": order, "max_in_flight": 4}
    target.touch()
    num_killed = 0
    for _ in range(6):
        wanted = target.read_bytes().count(b"\n") + rng.randrange(10)
        num_killed += kill_after(in_a_child(source, target, options), target, wanted, rng.uniform(0.0, 0.01))
        with target.open("ab") as torn:
            torn.write(b'{"id":"batch_req_7","custom_id":"id-6","resp'[: rng.choice((0, rng.randrange(40)))])
    summary = run(source, target, **options)
    check_all_there(target)
    assert num_killed > 0 and summary.num_earlier > 0


@pytest.mark.parametrize("seed", range(6))
def test_an_output_that_was_cut_anywhere_is_completed(source: Path, tmp_path: Path, seed: int) -> None:
    """Oracle: whole lines are kept and count; the job runs the rest; the next run finds nothing to do."""
    rng, target = random.Random(seed), tmp_path / "out.jsonl"
    run(source, target, output_order=rng.choice(["input", "finished"]))
    kept = target.read_bytes()[: rng.randrange(target.stat().st_size)]
    target.write_bytes(kept)
    summary = run(source, target, output_order=rng.choice(["input", "finished"]))
    assert summary.num_earlier == kept.count(b"\n")
    check_all_there(target)
    assert run(source, target).num_earlier == NUM_LINES


def test_an_interrupted_job_says_so_and_is_resumed(llm: FakeLLM, source: Path, tmp_path: Path) -> None:
    """Oracle: the results so far are whole lines; the next run, with a fresh engine, adds the rest."""
    target = tmp_path / "out.jsonl"
    summary = run(source, target, stop=lambda: llm.engine.num_steps >= 30)
    num_results = len(results_of(target))
    assert 0 < num_results < NUM_LINES and summary.num_remaining == NUM_LINES - num_results
    assert (summary.status, exit_code(summary)) == (BatchStatus.STOPPED, 1)
    assert "run the same command" in summary.as_text()
    assert run(source, target).num_earlier == num_results
    check_all_there(target)


def test_an_engine_that_fails_leaves_what_was_done(
    llm: FakeLLM, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the job raises the engine's error; the summary reports it; the next run resumes."""
    finish, num_ended = FakeEngine.step, 0

    def step(engine: FakeEngine) -> Any:
        nonlocal num_ended
        if num_ended >= 10:
            num_ended, engine.fail_at_step = 0, engine.num_steps + 1
        output = finish(engine)
        num_ended += sum(delta.finish_reason is not None for delta in output.deltas)
        return output

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="told to fail"):
        patched.setattr(FakeEngine, "step", step)
        run(source, tmp_path / "out.jsonl", summary_file=str(tmp_path / "summary.json"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "told to fail" in summary["error"]
    assert 0 < summary["num_succeeded"] == len(results_of(tmp_path / "out.jsonl")) - summary["num_failed"]
    run(source, tmp_path / "out.jsonl")
    check_all_there(tmp_path / "out.jsonl")


def test_changed_inputs(source: Path, tmp_path: Path) -> None:
    """Oracle: custom_id identifies a line: in another order no line runs again, and new lines run."""
    target = tmp_path / "out.jsonl"
    lines = [completion(f"id-{number}", "ab") for number in range(6)]
    source.write_text("\n".join(lines))
    run(source, target)
    source.write_text("\n".join([completion("new", "ab"), *reversed(lines[1:])]))
    summary = run(source, target)
    assert (summary.num_lines, summary.num_earlier, len(results_of(target))) == (6, 5, 7)
