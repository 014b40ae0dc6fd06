"""A whole engine on the GPU's data path, whose steps with prompts run padded, as in recordings.

The launches of a recording are those of its first run, whatever is in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.interpreted.engines import MODEL, gpu_path
from tests.unit.attention.test_kv_groups import WINDOWED
from tests.unit.kernels.kernel_harness import triton_ops_on_cpus
from tp_engine import LLM, SamplingParams
from tp_engine.features.speculation.feature import BASE_ROWS
from tp_engine.features.speculation.proposer import Proposal
from tp_engine.features.speculation.suffix_proposer import SuffixProposer
from tp_engine.plan import IntArray, StepPlan
from tp_engine.sched.sequence import Sequence
from tp_engine.worker.batch.padded_batch import StepSize, StepSizes
from tp_engine.worker.graphs.recorder import Keep, Recording, Step, keep_nothing
from tp_engine.worker.graphs.step_runner import Captured, GraphPlan, StepRunner

OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 80,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}
SIZES = StepSizes(decodes=(0, 4), tokens=(4, 16))
SHARED = list(range(20, 43))  # five blocks and a part of the sixth
PROMPTS = [[5, 9, 13, 7], SHARED, [7] * 17, [3], [4, 5]]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 5, "seed": 4},
    {"temperature": 0, "presence_penalty": 1.5},
    {"temperature": 0, "logprobs": 2},
)
Launch = tuple[Any, ...]
SeenStep = tuple[StepSize, bool, bool]
"""A step's recording, and whether anything is sampled, and draft tokens are verified."""


class StrictRecording:
    """Runs the step again, and checks that its launches are those of the first run, which a graph would repeat."""

    is_settled = True

    def __init__(self, step: Step) -> None:
        self._step = step
        self._first, self.output = launches_of(step)

    def run(self) -> torch.Tensor:
        found, self.output = launches_of(self._step)
        assert found == self._first, [pair for pair in zip(found, self._first, strict=False) if pair[0] != pair[1]][:1]
        return self.output


class StrictRecorder:
    """See ``StrictRecording``."""

    def record(self, step: Step, keep: Keep = keep_nothing) -> Recording:
        return StrictRecording(step)


def propose_the_last(self: SuffixProposer, sequence: Sequence, tokens: IntArray, count: int) -> list[Proposal]:
    """The last token, again and again."""
    return [Proposal(np.full(count, tokens[-1]), self.most_matched["ngram"], "ngram")]


def launches_of(step: Step) -> tuple[list[Launch], torch.Tensor]:
    """What ``step`` launches: kernels, grids, numbers, and the shapes of tensors, not where they are."""
    launches: list[Launch] = []
    run = InterpretedFunction.run

    def run_and_note(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        launches.append((self.fn.__name__, *map(seen, args), *((name, seen(kwargs[name])) for name in sorted(kwargs))))
        return run(self, *args, **kwargs)

    with patch.object(InterpretedFunction, "run", run_and_note):
        return launches, step()


def seen(argument: Any) -> Any:
    """An argument as a graph keeps it."""
    return (argument.shape, argument.stride()) if isinstance(argument, torch.Tensor) else argument


@contextmanager
def recorded_prompts(seen_of_steps: set[SeenStep], is_measured: bool) -> Iterator[None]:
    """Inside, the path is a GPU's, and steps with prompts are recorded; ``seen_of_steps`` gets what was seen of each.

    If it ``is_measured``, the start also warms up, which takes long, and measures what recordings take.
    """
    replay = StepRunner.replay

    def replay_and_note(self: StepRunner, found: Captured, plan: StepPlan) -> Any:
        if isinstance(found.size, StepSize):
            seen_of_steps.add((found.size, bool(len(plan.sampled_rows)), bool(len(BASE_ROWS.of(plan)))))
        return replay(self, found, plan)

    plan = GraphPlan(sizes=(1, 2, 4), prompts=SIZES, make_recorder=StrictRecorder)
    with (
        gpu_path(plan, warms_up=is_measured),
        patch("tp_engine.worker.batch.padded_batch.MAX_CHUNKS", 4),  # less to interpret
        patch.object(StepRunner, "replay", replay_and_note),
        patch.object(SuffixProposer, "proposals", propose_the_last),
    ):
        yield


def serve(folder: Path, **options: Any) -> list[list[int]]:
    """Chunks beside decodes, every kind of sampling, prefix hits, forks, and prompts that are scored."""
    tokens: list[list[int]] = []
    with LLM(str(folder), device="cpu", dtype="float32", attention_backend="torch", **OPTIONS, **options) as llm:

        def add(prompts: list[list[int]], params: list[SamplingParams]) -> None:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.extend(sample.token_ids for output in outputs for sample in output.outputs)

        add(PROMPTS, [SamplingParams(max_tokens=2 + i, ignore_eos=True, **kind) for i, kind in enumerate(KINDS)])
        greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        forked = SamplingParams(temperature=0.9, n=2, seed=6, max_tokens=2, ignore_eos=True)
        add([[*SHARED, 8, 9], SHARED, [*SHARED, 8, 2, 1]], [greedy, forked, greedy])
        scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
        add([[6, 5, 4], [9, 8]], [scored, greedy])
        add([list(range(50, 70))], [greedy])
        # The first request goes on while prompts come and go; the last prompt is computed beside it alone.
        lengths = (6, 1, 1, 1, 1)
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in lengths]
        add([[7, 8] * 6, [3], [4], [5], [6]], params)
        llm.engine.check_integrity()
    return tokens


def check(folder: Path, is_measured: bool, **options: Any) -> set[SeenStep]:
    """The tokens are equal with and without recordings, and ``options``; returns the recordings that were used."""
    used: set[SeenStep] = set()
    expected = serve(folder)
    with triton_ops_on_cpus() as operations, recorded_prompts(used, is_measured):
        found = serve(folder, **options)
    assert found == expected, (found, expected)
    assert {"prepare_steps", "advance_steps"} <= operations
    return used


@pytest.mark.slow
@pytest.mark.parametrize("model", ["one_table", "windows"])
def test_prompts_in_recordings(model: str, checkpoint: Callable[..., Path]) -> None:
    """Oracle: the tokens of the same engine on plain PyTorch; of each recording, its first launches."""
    options: dict[str, Any] = {}
    if model == "windows":
        shape: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
        layers = {"num_layers": 2, "layer_types": WINDOWED["layer_types"][:2]}
        folder = checkpoint(**shape, **WINDOWED | layers)
        # Lanes, which verify draft tokens (plan.py), follow the rows that decode; most draft tokens are wrong.
        options = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 1, "max_step_rows": 8}'}
    else:
        folder = checkpoint("qwen3", **MODEL)
    used = check(folder, is_measured=model == "windows", **options)
    assert {size for size, _, _ in used} == set(SIZES.largest_first), used
    assert {is_sampled for _, is_sampled, _ in used} == {False, True}, used
    assert {has_draft_rows for _, _, has_draft_rows in used} == {False, model == "windows"}, used
