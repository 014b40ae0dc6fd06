"""Outputs that are no numbers: one line in the log, which names the likely cause; on one rank and on several."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_checkpoint
from tp_engine import LLM, SamplingParams
from tp_engine.plan import StepPlan
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.worker.results.output_watch import OutputWatch
from tp_engine.worker.results.readback import PendingStep, Readback

CPU = torch.device("cpu")
NAN = float("nan")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The warnings about outputs until now."""
    monkeypatch.setattr(logging.getLogger("tp_engine"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="tp_engine")
    return lambda: [text for text in caplog.messages if "NaN" in text]


def broken(value: float = NAN, shape: tuple[int, int] = (3, 8)) -> torch.Tensor:
    """Zeros but for one number."""
    tensor = torch.zeros(shape)
    tensor[1, 5] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_nan_is_said_once(warnings: Callable[[], list[str]], dtype: torch.dtype) -> None:
    """Oracle: by hand: infinity is a number here; the line has the step and the causes; other models are new."""
    watch, zeros = OutputWatch(CPU, is_first=True), torch.zeros(3, 8, dtype=dtype)
    for step_id, hidden in enumerate((zeros, broken(float("inf")).to(dtype), broken().to(dtype), broken().to(dtype))):
        watch.look(step_id, hidden, zeros)
    (line,) = warnings()
    assert "outputs at step 2" in line and "checkpoint" in line and "--dtype bfloat16" in line
    model: Any = None
    assert watch.take_model(model) == []
    watch.look(9, broken(), zeros)
    assert len(warnings()) == 2


def test_each_rank_speaks_of_its_own_logits(warnings: Callable[[], list[str]]) -> None:
    """Oracle: by hand: all ranks have the outputs, so the first speaks; logits are a rank's slice, once."""
    zeros = torch.zeros(3, 8)
    other = OutputWatch(CPU, is_first=False)
    other.look(1, broken(), torch.zeros(3, 0))
    assert warnings() == []
    other.look(2, zeros, broken())  # the first step is over
    assert warnings() == []
    OutputWatch(CPU, is_first=False).look(1, zeros, broken())
    (line,) = warnings()
    assert "output head" in line
    OutputWatch(CPU, is_first=True).look(1, broken(), broken())
    assert len(warnings()) == 2 and "outputs at step 1" in warnings()[1]


def test_log_probabilities_are_looked_at(warnings: Callable[[], list[str]]) -> None:
    """Oracle: by hand: minus infinity is one, NaN is none; what arrives is unchanged."""
    watch = OutputWatch(CPU)
    fetch = Readback(1, CPU).fetch
    for value in (-math.inf, NAN, NAN):
        given = torch.tensor([[0.0, 0.0, NAN], [value, 0.0, 0.0]])
        ids, ranks = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        logprobs = LogprobTensors(token_ids=ids, logprobs=given, ranks=ranks).to_host(fetch)
        step = PendingStep(plan=StepPlan(step_id=1), logprobs=logprobs, fetch=fetch)
        watch.on_sampled(step, None, ids)
        wait = step.logprobs
        assert wait is not None and np.array_equal(wait().logprobs, given.numpy(), equal_nan=True)
    assert len(warnings()) == 1


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_broken_checkpoint_is_said_by_the_engine(
    tmp_path: Path, name: str, warnings: Callable[[], list[str]]
) -> None:
    """Oracle: one line for a checkpoint with one NaN, however many requests; none for the same one without it."""
    make_checkpoint(tmp_path, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=16)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for breaks in (False, True):
        if breaks:
            tensors[name].view(-1)[3] = NAN
            save_file(tensors, path, metadata={"format": "pt"})
        with LLM(str(tmp_path), device="cpu", num_gpu_blocks_override=16) as llm:
            for _ in range(2):
                llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
        assert len(warnings()) == int(breaks)
