"""The engines that the offline benchmark compares, behind one interface.

An engine answers a workload with the time to the first token (of a single request), the total time, and the tokens.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.workloads import Workload
from tp_engine.weights.dummy import DummyWeights
from tp_engine.weights.source import Source, whole


@dataclass(frozen=True)
class Measurement:
    """Seconds of one run of a workload; ``first_token_s`` is set only if the workload is one request."""

    total_s: float
    first_token_s: float | None
    token_ids: list[list[int]]


class Engine(Protocol):
    """One engine with a model loaded."""

    def run(self, workload: Workload) -> Measurement:
        """Generate exactly the tokens that the workload asks for."""

    def close(self) -> None:
        """Free the model."""


class TpEngine:
    """tp_engine, in this process."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        from tp_engine import LLM

        self.llm = LLM(model, **options)

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
        del self.llm
        free_device()


class TransformersGenerate:
    """transformers' ``generate`` on one left-padded batch, run to the longest answer; only requested tokens count.  On
    CUDA it uses a static cache, so that transformers compiles the decode step.  ``dummy`` fills the model with the
    random weights that tp_engine draws for ``load_format="dummy"``."""

    def __init__(self, model: str, dtype: str, *, dummy: bool) -> None:
        from transformers import AutoModelForCausalLM

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if dummy:
            loaded = dummy_model(model, getattr(torch, dtype), self._device)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(self._device)
        self._model = loaded.eval()
        self._options = {"cache_implementation": "static"} if self._device.type == "cuda" else {}

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
                input_ids=input_ids.to(self._device),
                attention_mask=mask.to(self._device),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **self._options,
            )
            tokens = out[:, longest:].tolist()
        return time.perf_counter() - started, tokens

    def close(self) -> None:
        del self._model
        torch._dynamo.reset()
        free_device()


def dummy_model(model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model of a folder without weights; it gets the weights of ``load_format="dummy"``, seed 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)
    with torch.no_grad():
        parameters = dict(loaded.named_parameters())
        weights = dummy_weights({name: tuple(value.shape) for name, value in parameters.items()}, dtype, device)
        for name, value in weights:
            parameters[name].copy_(value)
    return loaded


def save_dummy_checkpoint(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Write the dummy weights as one safetensors file, for engines without ``load_format="dummy"``."""
    from safetensors.torch import save_file

    save_file(dict(dummy_weights(shapes, dtype, torch.device("cpu"))), folder / "model.safetensors")


def dummy_weights(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Any:
    """The (name, tensor) pairs of all shapes."""
    sources = [
        Source(name=name, shape=shape, taken=whole(shape), target=whole(shape), init=1.0 if "norm." in name else None)
        for name, shape in shapes.items()
    ]
    weights = DummyWeights(sources, 0, dtype=dtype, device=device)
    for source in sources:
        yield source.name, weights.read(source.name, source)


def free_device() -> None:
    """Free the GPU memory of a closed engine."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
