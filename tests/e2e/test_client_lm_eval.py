"""Tasks of lm-eval through ``tp-engine eval``: the same questions as a task of our own, and the same answers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.apps.eval.scripted_server import scripted_server
from tp_engine.apps.eval.tasks import SHIPPED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def write_task(folder: Path, name: str, num: int, **fields: Any) -> None:
    """A task of lm-eval's with the first questions of a shipped one."""
    lines = (SHIPPED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[1 : num + 1]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    dataset = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / f"{name}.jsonl")}}
    task = {"task": f"their_{name}", "test_split": "train", "doc_to_text": "{{prompt}}", **dataset, **fields}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def metric(name: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True}]


@pytest.mark.timeout(700)
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (extra: eval)")
def test_tasks_of_lm_eval_have_the_answers_of_ours(tmp_path: Path) -> None:
    """Oracle: each task of lm-eval beside ours with the same questions, of a server that adds by rule and likes some
    letters: chats, and choices by log-probability; a metric of another kind is refused."""
    sums = {"output_type": "generate_until", "doc_to_target": "{{answer}}", "metric_list": metric("exact_match")}
    generation = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    write_task(tmp_path, "sums", 40, generation_kwargs=generation, **sums)
    choices = {"doc_to_choice": "choices", "doc_to_target": "{{choices.index(answer)}}", "target_delimiter": ""}
    write_task(tmp_path, "facts", 40, output_type="multiple_choice", metric_list=metric("acc"), **choices)

    def answer(text: str) -> str:
        one, other = text.removesuffix("=").split("+")
        return str(int(one) + int(other)) if int(one) % 10 else "no idea"

    def run(url: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tp_engine", "eval", "--url", url, "--include-path", str(tmp_path), *more]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=340
        )

    with scripted_server(answer, likes="abcdef") as server:
        done = run(server.url, "--tasks", "their_sums", "sums", "their_facts", "facts", "--limit", "40", "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        lines = {line["name"]: line["numbers"] for line in json.loads(done.stdout[done.stdout.index("{\n") :])["lines"]}
        assert 20 < lines["sums"]["right"] == lines["their_sums"]["right"] < 40
        assert 0 < lines["facts"]["right"] == lines["their_facts"]["right"] < 40
        asked = [body["messages"][-1]["content"] for body in server.bodies if "messages" in body]
        assert sorted(asked[:40]) == sorted(asked[40:]), "lm-eval's questions are chats, too"
        brier = [{"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False}]
        write_task(tmp_path, "facts", 5, output_type="multiple_choice", metric_list=brier, **choices)
        done = run(server.url, "--tasks", "their_facts")
        assert done.returncode == 2 and "none of which says of an answer whether it is right" in done.stderr
