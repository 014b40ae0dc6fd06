"""Runs the steps that fit a recording: captures them at the start, and finds the one that holds a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import StepPlan
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.padded_batch import PaddedBatch, StepSize, StepSizes
from tp_engine.worker.graphs.captured_steps import CapturedSteps, DecodeShape, StepParts
from tp_engine.worker.graphs.recorder import CudaRecorder, Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Record decode steps of ``sizes`` rows, and steps with ``prompts``, with a recorder from ``make_recorder``."""

    sizes: tuple[int, ...]
    prompts: StepSizes | None = None
    make_recorder: Callable[[], Recorder] = CudaRecorder


class Captured(NamedTuple):
    """The captured steps that hold a plan, and the size of which it is there."""

    steps: CapturedSteps[Any]
    size: Any


class StepRunner:
    """Captures steps of a model runner's ``batch``, and replays them; all captures are collectives.

    ``records`` and ``forgets`` are ``RunnerHooks``, for what follows steps of decodes.
    """

    def __init__(
        self,
        batch: InputBatch,
        parts: StepParts,
        *,
        records: Sequence[Callable[[int, Recorder], None]] = (),
        forgets: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._batch, self._parts = batch, parts
        self._records, self._forgets = records, forgets
        self._decodes: CapturedSteps[int] | None = None
        self._prompts: CapturedSteps[StepSize] | None = None
        self._captured: list[CapturedSteps[Any]] = []

    def take_model(self, model: LanguageModel) -> None:
        """Capture steps of ``model`` from now on; there are no recordings any more."""
        self.forget()
        self._parts = replace(self._parts, model=model)

    def capture(self, plan: GraphPlan, most_rows: int | None = None) -> None:
        """Capture all of ``plan``, or only the decodes that serve up to ``most_rows`` rows."""
        recorder, sizes = plan.make_recorder(), plan.sizes
        if most_rows is not None:
            sizes = sizes[: 1 + sum(size < most_rows for size in sizes[:-1])]
        elif plan.prompts is not None:
            self.capture_prompts(plan.prompts, recorder, plan.prompts.largest_first)
        self.capture_decodes(sizes, recorder, sizes[::-1], plan.make_recorder())

    def capture_decodes(
        self, sizes: Sequence[int], recorder: Recorder, part: Sequence[int], behind: Recorder | None = None
    ) -> None:
        """Capture those decode steps of ``sizes`` (rising) rows that are in ``part``.

        What follows them is recorded by ``behind``, with memory of its own: it runs while the step's tokens, which lie
        in that of ``recorder``, are still to be read.
        """
        if self._decodes is None:
            self._decodes = CapturedSteps(DecodeShape(self._batch.decodes, sizes), self._parts)
            self._captured.insert(0, self._decodes)
        self._decodes.capture(part, recorder)
        for record in self._records:
            for size in part:
                record(size, recorder if behind is None else behind)

    def capture_prompts(self, sizes: StepSizes, recorder: Recorder, part: Sequence[StepSize]) -> None:
        """Capture those steps with prompts of ``sizes`` that are in ``part``."""
        if self._prompts is None:
            self._prompts = CapturedSteps(PaddedBatch(self._batch.row_tables(), sizes), self._parts)
            self._captured.append(self._prompts)
        self._prompts.capture(part, recorder)

    def forget(self) -> None:
        """Destroy the recordings, if there are any; from now on every step is launched."""
        for captured in self._captured:
            captured.close()
        for forget in self._forgets:
            forget()
        self._captured.clear()
        self._decodes = self._prompts = None

    def find(self, plan: StepPlan) -> Captured | None:
        """Return what holds the step ``plan``; None if it is launched."""
        for steps in self._captured:
            if (size := steps.shape.size_for(plan)) is not None:
                return Captured(steps, size)
        return None

    def replay(self, found: Captured, plan: StepPlan) -> tuple[torch.Tensor | None, LogprobTensors | None]:
        """Run the step ``plan`` from what ``find`` has found; see ``CapturedSteps.run``."""
        batch = self._batch
        tokens = found.steps.run(plan, found.size, batch.num_computed)
        batch.count_computed(plan.decode_rows)
        if len(plan.prefill_rows):
            batch.count_computed(plan.prefill_rows, plan.prefill_tokens)
        return tokens
