"""The batch job with the demo model: under torchrun, from a plain script, and resumed after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.frontend import wait_until
from tests.e2e.serving import ROOT, launch
from tests.ranks.launch import torchrun
from tp_engine import run_batch
from tp_engine.api.batch_file.lines import line_number

SMALL = ("--device", "cpu", "--num-gpu-blocks-override", "256", "--max-num-seqs", "4")


def write_sums(path: Path, num_lines: int) -> None:
    """Write lines that ask for sums, at each endpoint in turn, and one line that is not a request."""
    lines = []
    for number in range(num_lines):
        question = f"{number % 10}+{number // 10 % 10}="
        body: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        if number % 3 == 0:
            url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": question}]
        elif number % 3 == 1:
            url, body["prompt"] = "/v1/completions", f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        else:
            url, body = "/v1/responses", {"input": question, "max_output_tokens": 8, "temperature": 0}
        lines.append(json.dumps({"custom_id": f"sum-{number}", "method": "POST", "url": url, "body": body}))
    path.write_text("\n".join([*lines, '{"custom_id": "bad"}']) + "\n", encoding="utf-8")


def check_sums(path: Path, num_lines: int) -> None:
    """Oracle: arithmetic, and one result for each custom_id."""
    results = {result["custom_id"]: result for result in map(json.loads, path.read_text().splitlines())}
    assert len(results) == len(path.read_text().splitlines()) == num_lines + 1
    assert results["bad"]["error"] is not None
    for number in range(num_lines):
        answer = results[f"sum-{number}"]["response"]["body"]
        if "output" in answer:
            text = answer["output"][0]["content"][0]["text"]
        else:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text == str(number % 10 + number // 10 % 10), (number, text)


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """Two ranks; lines with errors do not fail the job; a second run of a finished job, on one rank without torchrun,
    loads no model.

    Oracle: arithmetic.
    """
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_sums(source, 20)
    arguments = ["-i", str(source), "-o", str(target), *SMALL]
    job = torchrun(2, ["launch/batch.py", *arguments])
    assert job.returncode == 0, job.stdout[-5000:]
    check_sums(target, 20)
    again = subprocess.run(
        [sys.executable, "launch/batch.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 3, again.stderr[-5000:]
    check_sums(target, 20)
    assert "21 of 21 lines have a result" in again.stderr and "loading weights" not in again.stderr


def test_from_python(tmp_path: Path) -> None:
    """Oracle: arithmetic; ``run_batch`` runs in this process."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_sums(source, 20)
    summary = run_batch(source, target, device="cpu", num_gpu_blocks_override=256, max_num_seqs=4)
    assert (summary.num_succeeded, summary.num_failed) == (20, 1)
    check_sums(target, 20)


@pytest.mark.slow
def test_pipes_and_signals(tmp_path: Path) -> None:
    """Between pipes a script writes results only; SIGTERM ends a job with exit code 1, and the next run continues.

    Oracle: arithmetic.
    """
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_sums(source, 200)
    command = [sys.executable, "-m", "tests.e2e.batch_fake", "--device", "cpu", "--output-order", "input"]
    environment = {**os.environ, "TEST_STEP_DELAY_S": "0.02"}
    first = subprocess.Popen([*command, "-i", str(source), "-o", str(target)], cwd=ROOT, env=environment)
    try:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 3, "results")
        first.terminate()
        assert first.wait(100) == 1
    finally:
        first.kill()
    num_results = target.read_bytes().count(b"\n")
    assert 3 <= num_results < 201 and target.read_bytes().endswith(b"\n")
    with source.open("rb") as lines:
        second = subprocess.run(
            [*command, "-i", "-", "-o", "-"], stdin=lines, capture_output=True, cwd=ROOT, timeout=170, check=False
        )
    assert second.returncode == 3, second.stderr
    numbers = [line_number(json.loads(line)["id"]) for line in second.stdout.splitlines()]
    assert numbers == [*range(1, 202)]
    assert [line_number(json.loads(line)["id"]) for line in target.read_text().splitlines()] == numbers[:num_results]


@pytest.mark.slow
def test_resumed_after_kill(tmp_path: Path) -> None:
    """Oracle: arithmetic; kill -9 leaves some results, with and without a torn last line; the second run adds only the
    missing ones."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_sums(source, 300)
    arguments = ["-i", str(source), "-o", str(target), *SMALL]
    first = launch(0, arguments, script="launch/batch.py")
    deadline = time.monotonic() + 200
    while not target.exists() or target.read_bytes().count(b"\n") < 10:
        assert first.process.poll() is None and time.monotonic() < deadline, first.text()[-3000:]
        time.sleep(0.005)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait(10)
    assert target.read_bytes().count(b"\n") < 300
    with target.open("a") as torn:
        torn.write('{"id": "torn')
    second = launch(0, arguments, script="launch/batch.py")
    assert second.process.wait(200) == 3, second.text()[-3000:]
    check_sums(target, 300)
