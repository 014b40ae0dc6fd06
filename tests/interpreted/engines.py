"""A whole engine on the GPU's data path, interpreted: every Triton kernel of a step, inputs made on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from tests.repeating_recorder import RepeatingRecorder
from tp_engine import LLM, SamplingParams
from tp_engine.attention.base import AttentionBackend, AttentionNeeds
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.plan import IntArray, StepPlan
from tp_engine.sampling.device_sampler import Filters, SamplerVariant
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.graphs.captured_steps import CapturedSteps
from tp_engine.worker.graphs.step_runner import GraphPlan

PROMPTS = [[5, 9, 13, 7], list(range(20, 50)), [7] * 17, [3]]
NUM_TOKENS = (12, 3, 5, 4)
# A checkpoint whose products Triton takes.
MODEL: dict[str, Any] = {"vocab_size": 101, "hidden_size": 128, "intermediate_size": 128}
RECORDED = GraphPlan(sizes=(1, 2, 4), make_recorder=RepeatingRecorder)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 5, "seed": 4},
    {"temperature": 0, "presence_penalty": 1.5},
)
# Steps of decodes alone, whether their sampling is recorded, and whether it ends the step, too: the penalised row ends
# first, then the ranked.
STEPS = {
    (SamplerVariant(Filters.RANKED, penalised=True), False, False),
    (SamplerVariant(Filters.RANKED), True, False),
    (SamplerVariant(), True, True),
}


def generate(
    folder: Path, quantization: str | None = None, *, sampling: Sequence[dict[str, Any]] = SAMPLING, **more: Any
) -> list[list[int]]:
    """Chunked prefills beside decodes, and sequences that end at different steps."""
    options: dict[str, Any] = {
        "quantization": quantization,
        **more,
        "max_model_len": 64,
        "num_gpu_blocks_override": 32,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, **own)
        for count, own in zip(NUM_TOKENS, sampling, strict=True)
    ]
    with LLM(str(folder), device="cpu", dtype="float32", attention_backend="torch", **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.engine.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


class CountedSteps(CapturedSteps[Any]):
    """Notes what ``STEPS`` has of each step, and in ``ends`` when it ends."""

    steps: ClassVar[set[tuple[SamplerVariant | None, bool, bool]]] = set()
    ends: ClassVar[list[str]] = []
    num_runs: ClassVar[int] = 0

    def close(self) -> None:
        super().close()
        self.ends.append("recordings")

    def run(
        self, plan: StepPlan, size: Any, num_computed: IntArray
    ) -> tuple[torch.Tensor | None, LogprobTensors | None]:
        assert self._sampler.device is not None
        kind = self._sampler.device.kind_of(plan.decode_rows, num_computed[plan.decode_rows] + 1)
        with (
            patch.object(self._sampler, "sample", side_effect=self._sampler.sample) as launched,
            patch.object(self.shape, "advance", side_effect=self.shape.advance) as advanced,
        ):
            result = super().run(plan, size, num_computed)
        CountedSteps.num_runs += 1
        self.steps.add((kind, not launched.called, not advanced.called))
        return result


@contextmanager
def gpu_path(
    plan: GraphPlan | Callable[..., GraphPlan] | None = None,
    *,
    backend: Callable[[AttentionNeeds], AttentionBackend] = lambda needs: TritonBackend(),
    steps: type[CapturedSteps[Any]] = CapturedSteps,
    warms_up: bool | None = None,
    products: bool = True,
) -> Iterator[None]:
    """Inside, attention and sampling are those of a GPU, and products unless they are left to C; steps of ``plan`` are
    recorded, by ``steps``.  The start warms up as on a GPU if it records, or as ``warms_up`` says."""
    stand_ins: dict[str, Any] = {
        "worker.runner_maker.SamplingState": partial(SamplingState, has_tables=True),
        "worker.start.select_backend": lambda _, needs, choices: backend(needs),
        "worker.graphs.step_runner.CapturedSteps": steps,
    }
    if products:
        stand_ins |= {
            "layers.quantization.dense.runs_triton": lambda device_type: True,
            "layers.quantization.quantised_products.runs_triton": lambda device_type: True,
            "layers.quantization.quantised_products.native_library": lambda: None,
        }
    if plan is not None:
        stand_ins["worker.start.graph_plan"] = plan if callable(plan) else lambda *_: plan
    if warms_up if warms_up is not None else plan is not None:
        stand_ins["worker.start.warms_up"] = lambda device_type: True
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch(f"tp_engine.{name}", stand_in))
        yield
