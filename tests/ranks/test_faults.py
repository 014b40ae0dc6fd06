"""Ranks that fail in several ways: the job ends in time, names the rank and the place, and leaves nothing behind.

These are a few cells of the matrix; ``scripts/test_faults`` runs all; ``tests/faults/cases.py`` defines the promises.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.cases import Case, run_case
from tests.faults.gate import Gate
from tests.ranks.launch import ROOT, TWO_RANKS, torchrun
from tests.services import engine_of, stepping
from tests.tiers import slow_but
from tp_engine import LLM, SamplingParams
from tp_engine.errors import PlanError, RankError
from tp_engine.plan import StepPlan

CELLS = [
    Case("script", 1, "import", "raise"),
    Case("script", 1, "group_init", "kill"),
    Case("script", 0, "load", "oom"),
    Case("script", 1, "agree", "exit"),
    Case("script", 1, "step_begin", "stop"),
    Case("script", 0, "collective", "raise"),
    Case("script", 1, "sample", "sleep"),
    Case("script", 1, "move", "stop"),
    Case("batch", 0, "step_begin", "kill"),
    Case("serve", 1, "collective", "kill"),
    Case("serve", 0, "sample", "stop"),
]
BATCH = str(ROOT / "launch" / "batch.py")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("case", slow_but([Case("serve", 1, "collective", "kill")], CELLS), ids=str)
def test_a_fault_ends_the_job(case: Case, tmp_path: Path) -> None:
    """Oracle: the promises: in time, exit code, rank, phase and cause in the output, nothing left behind."""
    outcome = run_case(case, tmp_path, Gate(threading.Semaphore(1)))
    assert not outcome.problems, "\n".join([*outcome.problems, outcome.output[-6000:]])


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], warm_children: None) -> Path:
    return checkpoint("qwen3")


@pytest.mark.slow
def test_equal_inputs_are_found_equal(folder: Path) -> None:
    """Oracle: the tokens of a run without the comparison of inputs; chunked prefill, several requests."""
    prompts = [list(range(5, 25)), [9, 9, 9], [7]]
    with LLM(str(folder), **{**TWO_RANKS, "tensor_parallel_size": 1}) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    checked = {**TWO_RANKS, "debug_compare_rank_inputs": True, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    with LLM(str(folder), **checked) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    assert found == expected


@pytest.mark.slow
def test_a_rank_whose_state_has_diverged_is_named(folder: Path) -> None:
    """Oracle: the test changes rank 0's own table, as a wrong plan would; the comparison ends the job at that step."""
    with LLM(str(folder), **TWO_RANKS, debug_compare_rank_inputs=True) as llm:
        llm.generate([[5, 9, 13]], PARAMS, use_tqdm=False)
        batch = engine_of(llm).worker.runner._batch
        batch._token_ids.fill_(3)
        batch.apply = lambda plan: None  # type: ignore[method-assign]
        batch.num_computed.fill(1)
        with pytest.raises(PlanError, match=r"step \d+: the ranks have diverged: rank 1 has inputs 0x"):
            llm.generate([[5, 9, 13]], PARAMS, use_tqdm=False)


@pytest.mark.slow
def test_a_plan_that_is_lost_on_the_way_names_rank_and_steps(folder: Path) -> None:
    """Oracle: rank 0 sends a step number five too high; rank 1 refuses it, and rank 0 raises rank 1's error."""
    with LLM(str(folder), **TWO_RANKS) as llm:
        llm.generate([[5, 9, 13]], PARAMS, use_tqdm=False)
        with stepping(llm) as engine:
            expected = engine.scheduler.next_step_id
            engine._publish(StepPlan(step_id=expected + 5))
        lost = rf"(?s)rank 1: .*step plan lost: expected step {expected}, received step {expected + 5}"
        with pytest.raises(RankError, match=lost):
            llm.generate([[5, 9, 13]], PARAMS, use_tqdm=False)


@pytest.mark.slow
def test_an_error_reaches_the_summary_of_torchrun(tmp_path: Path) -> None:
    """Oracle: torchrun's own summary, made from the ranks' error files."""
    options = ["--device", "cpu", "--num-gpu-blocks-override", "32", "--max-model-len", "64"]
    requests = tmp_path / "in.jsonl"
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1+2="}}
    requests.write_text(json.dumps(line) + "\n")  # without a request, no model is loaded
    job = tmp_path / "job.py"
    job.write_text(
        "import os, runpy\nos.environ['TP_ENGINE_FAULT'] = '1:load:raise'\n"
        f"runpy.run_path({BATCH!r}, run_name='__main__')\n"
    )
    done = torchrun(2, [str(job), *options, "-i", str(requests), "-o", str(tmp_path / "out.jsonl")])
    assert done.returncode == 1
    summary = done.stdout.partition("FAILED")[2]
    assert "injected by TP_ENGINE_FAULT: rank 1 in load" in summary, done.stdout[-4000:]
