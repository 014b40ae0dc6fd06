"""The first steps of a rank: within the limits, of every kind, and without effect on later steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.draft_heads import make_draft_head
from tp_engine import LLM, SamplingParams
from tp_engine.config import EngineConfig
from tp_engine.features.speculation.feature import BASE_ROWS, DRAFT_TOKENS
from tp_engine.features.speculation.trial_steps import time_decodes
from tp_engine.plan import StepPlan
from tp_engine.worker import start
from tp_engine.worker.trial_steps import warm_up, warms_up

Checkpoint = Callable[..., Path]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_seqs": 3}
PROMPTS = [[5, 9, 13, 7], list(range(20, 50)), [7] * 17]
PARAMS = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=6, ignore_eos=True)


class PlanReader:
    """A runner that keeps the plans; its steps end at once."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> PlanReader:
        self.plans.append(plan)
        return self

    def result(self) -> None:
        """An empty result."""


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 8), (2, 2), (5, 5), (256, 2048)])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_first_steps_keep_to_the_limits(rows: int, tokens: int, block_size: int, num_groups: int) -> None:
    """Oracle: the limits; each step releases the rows that the one before admitted, and lies in block 0."""
    runner: Any = PlanReader(num_groups)
    limits: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "max_model_len": 256}
    warm_up(runner, EngineConfig(block_size=block_size, **limits))
    for plan in runner.plans:
        scheduled = [*plan.decode_rows, *plan.prefill_rows]
        assert 0 < len(scheduled) <= rows and plan.num_tokens <= tokens
        assert scheduled == [admission.row for admission in plan.admitted] == list(range(len(scheduled)))
        assert len(plan.released) == rows and len(plan.prefill_samples) == len(plan.prefill_rows)
        for admission in plan.admitted:
            assert not admission.block_ids.any() and len(admission.block_ids) % num_groups == 0
            assert len(admission.block_ids) // num_groups * block_size >= len(admission.token_ids)
    assert max(len(plan.decode_rows) for plan in runner.plans) == rows
    assert len(runner.plans[0].prefill_rows) == 1
    is_mixed = [bool(len(plan.decode_rows) and len(plan.prefill_rows)) for plan in runner.plans]
    assert any(is_mixed) == (tokens >= 3 and rows >= 2)
    sizes = {size for plan in runner.plans for size in plan.prefill_tokens.tolist()}
    assert sizes - {1, 2} == ({32, 64, 128, 256} if tokens >= 256 else set())


def test_verified_rows_are_timed_as_they_run() -> None:
    """By hand: of every 4 rows of 7, one is a request's and the others are draft rows behind it."""
    runner: Any = PlanReader(num_groups=1)
    config = EngineConfig(max_num_seqs=8, max_model_len=64)
    assert set(time_decodes(runner, config, 7, run_length=4)) == {1, 2, 4, 7}
    plan = runner.plans[-1]
    assert plan.decode_rows.tolist() == [0, 1, 8, 9, 10, 11, 12]
    assert BASE_ROWS.of(plan).tolist() == [0, 0, 0, 1, 1] and len(DRAFT_TOKENS.of(plan)) == 5
    assert set(time_decodes(runner, config, 7)) == {1, 2, 4, 7}
    assert runner.plans[-1].decode_rows.tolist() == list(range(7)) and not runner.plans[-1].extensions


def test_gpus_warm_up() -> None:
    """Oracle: GPUs warm up; CPUs do not, because their kernels are compiled when they are loaded."""
    assert warms_up("cuda") and not warms_up("cpu")


def test_drafts_warm_up(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the tokens of an engine without draft tokens or a warm-up."""
    folder = checkpoint("llama", vocab_size=263, num_layers=4, tie=False)
    head = make_draft_head(tmp_path / "head", vocab_size=263, state_layers=(0, 1, 2))
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2, "max_step_rows": 3}
    found = []
    for speculation in (None, json.dumps(config)):
        is_warm = speculation is not None
        monkeypatch.setattr(start, "warms_up", lambda device_type, is_warm=is_warm: is_warm)
        with LLM(str(folder), speculative_config=speculation, **OPTIONS) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_nothing_is_left_of_the_first_steps(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the tokens of an engine without a warm-up; its phase is reported, and its steps do not count."""
    folder, found = checkpoint("qwen3"), []
    for is_warm in (False, True):
        monkeypatch.setattr(start, "warms_up", lambda device_type, is_warm=is_warm: is_warm)
        caplog.clear()
        with (
            caplog.at_level(logging.DEBUG, logger="tp_engine"),
            LLM(str(folder), debug_compare_rank_inputs=True, **OPTIONS) as llm,
        ):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            llm.engine.check_integrity()
        found.append([output.outputs[0].token_ids for output in outputs])
        assert ("warming up took" in caplog.text) == is_warm
        assert "tables" in caplog.text
    assert found[0] == found[1]
