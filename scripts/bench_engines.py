"""The engines that the offline benchmark compares, behind one interface.

An engine answers a workload with the time to the first token (where one request runs), the total time, and the tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from bench_workloads import Workload


@dataclass(frozen=True)
class Measurement:
    """Seconds of one run of a workload; ``first_token_s`` only where the workload is one request."""

    total_s: float
    first_token_s: float | None
    token_ids: list[list[int]]


class Engine(Protocol):
    """One engine with a model loaded."""

    name: str

    def run(self, workload: Workload) -> Measurement:
        """Generate exactly the tokens that the workload asks for."""

    def close(self) -> None:
        """Free the model."""


class TpEngine:
    """This project, in-process."""

    def __init__(self, model: str, dtype: str, tensor_parallel_size: int, options: dict[str, object]) -> None:
        from tp_engine import LLM

        self.name = f"tp_engine TP {tensor_parallel_size}"
        self.llm = LLM(model, dtype=dtype, tensor_parallel_size=tensor_parallel_size, **options)

    def run(self, workload: Workload) -> Measurement:
        from tp_engine import SamplingParams

        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in workload.max_tokens]
        started = time.perf_counter()
        outputs = self.llm.generate(workload.prompts, params, use_tqdm=False)
        total_s = time.perf_counter() - started
        metrics = outputs[0].metrics
        assert metrics is not None
        first = metrics.ttft_s if len(outputs) == 1 else None
        return Measurement(total_s, first, [output.outputs[0].token_ids for output in outputs])

    def close(self) -> None:
        self.llm.close()


class TransformersGenerate:
    """transformers' ``generate`` on one left-padded batch, run to the longest answer; only wanted tokens count."""

    name = "transformers generate"

    def __init__(self, model: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(self, workload: Workload) -> Measurement:
        first = self._generate(workload.prompts, 1)[0] if len(workload.prompts) == 1 else None
        total_s, rows = self._generate(workload.prompts, max(workload.max_tokens))
        tokens = [row[:count] for row, count in zip(rows, workload.max_tokens, strict=True)]
        return Measurement(total_s, first, tokens)

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        longest = max(len(prompt) for prompt in prompts)
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        started = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return time.perf_counter() - started, out[:, longest:].tolist()

    def close(self) -> None:
        del self._model
