"""Whole engines whose norms write 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.interpreted.engines import gpu_path
from tests.unit.kernels.kernel_harness import triton_ops_on_cpus
from tp_engine import LLM, SamplingParams
from tp_engine.kernels.quantization import norm_codes_triton

PROMPTS = [list(range(20, 44)), [7] * 3, [5, 9, 13]]
# From 5 rows on, products are of codes: chunks of prompts are above, decodes and what the last layer reads below.
FEW_ROWS = 4
# Attention, then MLP; and both side by side, behind one norm.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_layers": 2},
    "cohere2": {"num_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}


def generate(folder: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, with chunks of prompts beside decodes."""
    options: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 12}
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(str(folder), device="cpu", dtype="bfloat16", quantization="fp8", max_num_seqs=3, **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    found = []
    for output in outputs:
        assert output.logprobs is not None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        found.append((output.token_ids, [at[token].logprob for token, at in pairs]))
    return found


@contextmanager
def codes_on_cpus() -> Iterator[None]:
    """Inside, more than ``FEW_ROWS`` rows are multiplied as codes, by PyTorch on a CPU."""
    candidates = "tp_engine.kernels.quantization.linear_candidates"
    with (
        triton_ops_on_cpus(),
        gpu_path(),
        patch(f"{candidates}.why_no_triton", lambda shape, device: None),
        patch(f"{candidates}.has_fp8_units", lambda device: True),
        patch(f"{candidates}.FEW_ROWS_BESIDE_CODES", FEW_ROWS),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
def test_norms_with_codes(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """Oracle: the same engine, in which the norms write rows and the products make the codes: tokens and
    log-probabilities are equal bit by bit."""
    folder = checkpoint(architecture, vocab_size=101, hidden_size=64, intermediate_size=64, **MODELS[architecture])
    kernel = norm_codes_triton.norm_codes_kernel
    with codes_on_cpus(), patch.object(norm_codes_triton, "norm_codes_kernel", CountedLaunches(kernel)) as launches:
        found = generate(folder)
        assert launches.count > 0
        launches.count = 0
        with patch("tp_engine.layers.residual.wanted_codes", lambda products: None):
            expected = generate(folder)
        assert launches.count == 0
    assert found == expected


class CountedLaunches:
    """Launches of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.count = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count += 1
        return self._kernel[grid]
