"""The batch job with the demo model: under torchrun, from a plain script, and resumed after kill -9."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import torchrun
from tests.e2e.serving import launch
from tp_engine.api.batch import run_batch
from tp_engine.api.batch_config import BatchConfig
from tp_engine.config import EngineConfig

SMALL = ("--device", "cpu", "--num-gpu-blocks-override", "256", "--max-num-seqs", "4")


def write_sums(path: Path, num_lines: int) -> None:
    """Lines that ask for sums, chat and completions in turn, and one that is no request."""
    lines = []
    for number in range(num_lines):
        question = f"{number % 10}+{number // 10 % 10}="
        body: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        url = "/v1/chat/completions" if number % 2 == 0 else "/v1/completions"
        if number % 2 == 0:
            body["messages"] = [{"role": "user", "content": question}]
        else:
            body["prompt"] = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        lines.append(json.dumps({"custom_id": f"sum-{number}", "method": "POST", "url": url, "body": body}))
    path.write_text("\n".join([*lines, '{"custom_id": "bad"}']) + "\n", encoding="utf-8")


def check_sums(path: Path, num_lines: int) -> None:
    """Oracle: arithmetic, and one result for each custom_id."""
    results = {result["custom_id"]: result for result in map(json.loads, path.read_text().splitlines())}
    assert len(results) == len(path.read_text().splitlines()) == num_lines + 1
    assert results["bad"]["error"] is not None
    for number in range(num_lines):
        choice = results[f"sum-{number}"]["response"]["body"]["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text == str(number % 10 + number // 10 % 10), (number, text)


def test_under_torchrun(tmp_path: Path) -> None:
    """Two ranks; the job ends with exit code 0."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_sums(source, 20)
    job = torchrun(2, ["launch/batch.py", "-i", str(source), "-o", str(target), *SMALL])
    assert job.returncode == 0, job.stdout[-5000:]
    check_sums(target, 20)


def test_from_python(tmp_path: Path) -> None:
    """``run_batch`` in this process."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_sums(source, 20)
    config = EngineConfig(device="cpu", num_gpu_blocks_override=256, max_num_seqs=4)
    assert run_batch(config, BatchConfig(input_file=str(source), output_file=str(target)))
    check_sums(target, 20)


@pytest.mark.timeout(200)
def test_resumed_after_kill(tmp_path: Path) -> None:
    """kill -9 with some results written, torn last line or not: the second run completes the file, nothing is twice."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_sums(source, 300)
    arguments = ["-i", str(source), "-o", str(target), *SMALL]
    first = launch(0, arguments, script="launch/batch.py")
    deadline = time.monotonic() + 90
    while not target.exists() or target.read_bytes().count(b"\n") < 10:
        assert first.process.poll() is None and time.monotonic() < deadline, first.text()[-3000:]
        time.sleep(0.005)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait(10)
    assert target.read_bytes().count(b"\n") < 300
    with target.open("a") as torn:
        torn.write('{"id": "torn')
    second = launch(0, arguments, script="launch/batch.py")
    assert second.process.wait(100) == 0, second.text()[-3000:]
    check_sums(target, 300)
