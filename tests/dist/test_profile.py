"""Traces of an engine with several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.test_profiling import names_in
from tp_engine import LLM, SamplingParams


@pytest.mark.timeout(120)
def test_every_rank_writes_a_trace_of_the_same_steps(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the names of the chosen steps and of their parts, on both ranks."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(
        str(checkpoint("qwen3")), tensor_parallel_size=2, device="cpu", num_gpu_blocks_override=16, max_model_len=64,
        profile=str(tmp_path / "traces"), profile_steps="2:4",
    ) as llm:  # fmt: skip
        llm.generate([[5, 9, 13, 7]], params, use_tqdm=False)
    paths = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in paths] == ["rank0_steps2-3.json.gz", "rank1_steps2-3.json.gz"]
    for path in paths:
        found = [name for name in names_in(path) if name in ("prepare", "model", "sample") or name.startswith("step ")]
        assert found == ["step 2", "prepare", "model", "sample", "step 3", "prepare", "model", "sample"]
