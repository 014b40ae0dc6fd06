"""Engines and servers that start in a folder whose files have the names of modules.  Oracle: they answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import ROOT, serving
from tests.start_lines import check_start
from tests.unit.system.test_child_process import write_hostile_modules

pytestmark = pytest.mark.slow

_SCRIPT = """
import sys
from tp_engine import LLM, SamplingParams
for num_ranks in (1, 2):
    print("start", file=sys.stderr)
    with LLM(tensor_parallel_size=num_ranks, device="cpu", num_gpu_blocks_override=64, max_model_len=256) as llm:
        messages = [{"role": "user", "content": "12+34="}]
        print("answer", llm.chat(messages, SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].text)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hostile_modules(tmp_path_factory.mktemp("somewhere") / "files")


def test_llm(folder: Path, tmp_path: Path) -> None:
    """Oracle: the demo model's sum, at one rank and at two, which a script of another folder asks for here; where the
    script wants the log, each start is a screen."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    job = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder, capture_output=True, text=True, timeout=340,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TP_ENGINE_LOG_LEVEL": "INFO"},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-3000:]
    assert job.stdout.split() == ["answer", "46"] * 2
    nothing, *starts = job.stderr.split("start\n")
    assert not nothing and len(starts) == 2 and "\r" not in job.stderr
    for start in starts:
        check_start(start)


def test_server(folder: Path) -> None:
    """Oracle: the demo model's sum over HTTP, from ranks and an HTTP process that the server starts itself."""
    options = ["--device", "cpu", "--num-gpu-blocks-override", "64", "--max-model-len", "256"]
    with serving(0, "--tensor-parallel-size", "2", *options, cwd=folder) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0)
        with client:
            messages: Any = [{"role": "user", "content": "12+34="}]
            answer = client.chat.completions.create(model="demo_model", messages=messages, temperature=0)
    assert answer.choices[0].message.content == "46"
