"""Speculation of models with recurrent states and with heads for multi-token prediction, on one GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mtp_heads import FAMILIES, make_mtp
from tests.ranks.test_parity import make_prompts
from tp_engine import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PARAMS = [
    SamplingParams(temperature=t, seed=seed, max_tokens=24, ignore_eos=True) for seed, t in enumerate((0, 0, 0.9, 0.9))
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 256, "max_num_seqs": 8, "tune": "off",
}  # fmt: skip


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "glm4-moe", "deepseek-v3", "deepseek-v3.2"])
def test_drafts_change_no_token(
    family: str, method: str, enforce_eager: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the CPU's engine without speculation, in fp32."""
    folder = make_mtp(tmp_path / family, checkpoint(family, vocab_size=263, **FAMILIES[family]))
    prompts = make_prompts(263, len(PARAMS))
    with LLM(str(folder), device="cpu", **OPTIONS) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts, PARAMS, use_tqdm=False)]
    speculation = json.dumps({"method": method, "num_speculative_tokens": 3, "max_step_rows": 24})
    options = OPTIONS | {"speculative_config": speculation, "enforce_eager": enforce_eager}
    with LLM(str(folder), device="cuda", **options) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(prompts, PARAMS, use_tqdm=False)]
        llm.engine.check_integrity()
    assert found == expected
