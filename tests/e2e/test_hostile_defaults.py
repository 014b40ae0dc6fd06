"""Engines under what a program may have set for torch as a whole: their tensors have types and places of their own.

Under torchrun the ranks are the program's own processes, so an engine meets all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.services import services
from tp_engine import LLM, SamplingParams
from tp_engine.config import EngineConfig
from tp_engine.engine.service import EngineService
from tp_engine.engine.service_thread import ServiceThread

PROMPTS = [[5, 9, 13, 7], list(range(3, 40)), [5, 9, 13, 8]]
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=3, max_tokens=5, ignore_eos=True, logprobs=1,
    presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2, logit_bias={7: 1.5},
    allowed_token_ids=list(range(2, 190)),
)  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "max_model_len": 96}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3": {},
    "gpt-oss": {},
    "qwen3.5": {},
    "nemotron-h": {},
    "lfm2": {},
    "deepseek-v3.2": {},
    "qwen3 in bfloat16": {"dtype": "bfloat16"},
    "qwen3 in int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "qwen3 by PyTorch": {"attention_backend": "torch"},
    "qwen3 drafting": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
}
QUICK = {("qwen3", torch.bfloat16), ("qwen3.5", torch.float64)}


class HostileThread(ServiceThread):
    """Rank 0 in a thread with the settings that belong to threads.  Its start has none, because safetensors reads files
    to the default device: the threads of ranks are new ones."""

    def _run(self) -> None:
        serve = EngineService.run

        def run(service: EngineService) -> None:
            with torch.device("meta"), torch.enable_grad():
                serve(service)

        with patch.object(EngineService, "run", run), torch.enable_grad():
            torch.set_flush_denormal(True)
            super()._run()


def start_hostile(config: EngineConfig) -> ServiceThread:
    service = HostileThread(config)
    service.start()
    return service


@contextlib.contextmanager
def hostile(dtype: torch.dtype) -> Iterator[None]:
    """The settings of the whole process."""
    before = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_num_threads(before[1])


def answers(folder: Path, options: dict[str, Any]) -> list[Any]:
    """Tokens and log-probabilities of greedy and drawn answers, twice: then steps are played from tapes."""
    found = []
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        for _ in range(2):
            for params in (PLAIN, DRAWN):
                for output in llm.generate(PROMPTS, params, use_tqdm=False):
                    one = output.outputs[0]
                    found.append((one.token_ids, one.logprobs, list(output.prompt_logprobs or [])))
    return found


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(model, dtype, marks=[] if (model, dtype) in QUICK else [pytest.mark.slow])
        for number, model in enumerate(MODELS)
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
        if model == "qwen3" or number % 3 == (torch.bfloat16, torch.float16, torch.float64).index(dtype)
        or (model, dtype) in QUICK
    ],
    ids=str,
)  # fmt: skip
def test_defaults_of_the_program_decide_nothing(
    model: str, dtype: torch.dtype, checkpoint: Callable[..., Path]
) -> None:
    """Oracle: the same engine without them: the same tokens and log-probabilities, bit by bit."""
    folder, options = checkpoint(model.split()[0]), MODELS[model]
    expected = answers(folder, options)
    with hostile(dtype), services(start_hostile), torch.device("meta"), torch.autocast("cpu"):
        assert answers(folder, options) == expected
