"""Runs plans on one rank's device: apply the changes, run one forward pass, sample together with the other ranks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, TypeAlias

import torch

from tp_engine.attention.base import Backends, prepare_groups
from tp_engine.distributed.collectives import Communicator
from tp_engine.features.registry import Half, find_half
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.kernels.candidates import DEFAULTS, Choices
from tp_engine.layers.attention import forward_context
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import StepPlan
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.graphs.captured_steps import StepParts
from tp_engine.worker.graphs.step_runner import Captured, GraphPlan, StepRunner
from tp_engine.worker.memory.kv_cache import KvBlocks
from tp_engine.worker.profiling import Named, run_part
from tp_engine.worker.results.readback import Check, PendingStep, Readback, never_fails

Sampled: TypeAlias = tuple[torch.Tensor | None, LogprobTensors | None]
"""Token ids (n,) int32, None if nothing is sampled, and rank 0's log-probabilities, if any row asks for them."""


class ModelRunner:
    """One rank's model, persistent batch, KV cache and sampler; ``features`` are its optional parts.

    ``backends`` has one entry per group of layers (``kv_layout``), as the tables of ``batch``.  ``named`` names the
    parts of a step for profilers.  ``check`` raises if another rank has ended, while this one waits for its device.
    """

    def __init__(
        self,
        *,
        model: LanguageModel,
        backends: Backends,
        batch: InputBatch,
        blocks: KvBlocks,
        communicator: Communicator,
        sampling: SamplingState,
        progress: RankProgress,
        features: Sequence[RunnerFeature] = (),
        choices: Choices = DEFAULTS,
        check: Check = never_fails,
    ) -> None:
        self._model, self._backends, self._batch, self._sampling = model, backends, batch, sampling
        self.blocks, self.is_asleep = blocks, False
        self.named: Named | None = None
        self._inference_mode = torch.inference_mode()
        self._progress = progress
        self._use(features)
        self._found: tuple[int, Captured | None] = (0, None)  # of decodes: epoch and what holds their steps
        self._sampler = Sampler(sampling, communicator, choices)
        self._readback = Readback(len(batch.num_prompt), blocks.raw.device, check)
        self._graph_plan: GraphPlan | None = None
        steps = StepParts(
            model=model, backends=backends, sampler=self._sampler, state_room=self._room, keep_rows=self._keep_rows
        )
        self.graphs = StepRunner(batch, steps, records=self._hooks.record, forgets=self._hooks.forget)

    @property
    def kv_memory(self) -> tuple[torch.Tensor, ...]:
        """The blocks of the cache, and what the features have beside them."""
        return (self.blocks.raw, *(raw for memory in self._hooks.memory for raw in memory()))

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with block tables of its own."""
        return len(self._backends)

    @property
    def model(self) -> LanguageModel:
        """The model that the next step runs."""
        return self._model

    def feature(self, kind: type[Half]) -> Half | None:
        """Return the feature of this kind; None if it is switched off."""
        return find_half(self._features, kind)

    def required(self, kind: type[Half]) -> Half:
        """Return the feature of this kind, of which it is known that there is one."""
        found = self.feature(kind)
        assert found is not None, f"{kind.__name__} is switched off"
        return found

    def replace_features(self, gone: Sequence[RunnerFeature | None], new: Sequence[RunnerFeature]) -> None:
        """Run with ``new`` instead of ``gone`` from the next step on; neither records anything."""
        self._use([*new, *(one for one in self._features if one not in gone)])
        self._found = 0, None

    def _use(self, features: Sequence[RunnerFeature]) -> None:
        self._features, self._hooks = list(features), RunnerHooks()
        for feature in features:
            feature.attach(self._hooks)

    def take_model(self, model: LanguageModel) -> None:
        """Run ``model`` from the next step on, with the K/V and the states of the one before; a collective."""
        self.graphs.take_model(model)
        layers = [*model.attention_layers]
        for take_model in self._hooks.take_model:
            layers += take_model(model)
        self.blocks.bind(layers)
        self._model = model
        if not self.is_asleep:
            self.record(self._graph_plan)

    def check_sleep(self) -> None:
        """Raise ``RequestError`` if a feature cannot be without its memory."""
        for check_sleep in self._hooks.check_sleep:
            check_sleep()

    def report(self) -> dict[str, Any]:
        """Return what the engine's report has of the features, by field of ``EngineReport``."""
        return {name: value for report in self._hooks.report for name, value in report().items()}

    def record(self, plan: GraphPlan | None) -> None:
        """Capture the steps of ``plan``; None: every step is launched.  A collective."""
        self._graph_plan = plan
        self._found = 0, None
        if plan is not None:
            self.graphs.capture(plan)

    def record_again(self) -> None:
        """Capture the same steps as before; a collective."""
        self.record(self._graph_plan)

    def close(self) -> None:
        """Destroy the recordings, and give back what the features hold."""
        self.graphs.forget()
        for close in self._hooks.close:
            close()

    def run(self, plan: StepPlan) -> PendingStep:
        """Launch one step."""
        with self._inference_mode:
            run_part(self.named, "apply", self._apply, plan)
            step = PendingStep(plan=plan, fetch=self._readback.fetch)
            if plan.num_tokens:
                captured = self._find_captured(plan)
                if captured is None:
                    self._launch(step)
                else:
                    self._progress.reach(RankPhase.SAMPLE)
                    self._finish(step, None, run_part(self.named, "replay", self.graphs.replay, captured, plan))
            return step

    def _apply(self, plan: StepPlan) -> None:
        """The plan's changes, in its order: rows, new blocks, what features do, then copies."""
        for before_rows in self._hooks.before_rows:
            before_rows(plan)
        self._batch.apply(plan)
        self._sampling.apply(plan)
        if plan.admitted:
            for admit in self._hooks.admit:
                admit(plan.admitted)
        for apply in self._hooks.apply:
            apply(plan)
        if len(plan.copies):
            self.blocks.copy(plan.copies)

    def _find_captured(self, plan: StepPlan) -> Captured | None:
        """What holds the step, None if it is launched; looked up again when other rows decode, or beside prompts."""
        epoch = 0 if len(plan.prefill_rows) else plan.rows_epoch
        if not epoch or epoch != self._found[0]:
            must_launch = any(must_launch(plan) for must_launch in self._hooks.must_launch)
            self._found = epoch, None if must_launch else self.graphs.find(plan)
        return self._found[1]

    def _launch(self, step: PendingStep) -> None:
        named = self.named or nullcontext
        with named("prepare"):
            inputs = self._batch.prepare(step.plan)
            for on_inputs in self._hooks.on_inputs:
                on_inputs(step, inputs)
            prepare_groups(self._backends, inputs.attention)
        reads_all = any(one(inputs) for one in self._hooks.reads_all)
        room = self._room(len(inputs.input_ids))
        with named("model"), forward_context(inputs.attention), ExitStack() as contexts:
            for around_model in self._hooks.around_model:
                contexts.enter_context(around_model(step, inputs))
            wanted = None if reads_all else inputs.layout.wanted
            hidden = self._model(inputs.input_ids, inputs.rotary_positions, wanted, room)
        with named("sample"):
            if reads_all:
                for on_hidden in self._hooks.on_hidden:
                    on_hidden(step, inputs, hidden)
                hidden = hidden.index_select(0, inputs.layout.logit_index)
            sampled = self._sample(step, inputs, hidden)
            self._batch.advance(inputs, sampled[0])
            self._finish(step, inputs, sampled)

    def _sample(self, step: PendingStep, inputs: StepInputs, hidden: torch.Tensor) -> Sampled:
        """Sample after ``hidden`` (n, hidden); every rank gets the ids."""
        layout = inputs.layout
        if not len(layout.sampled_rows):
            return None, None
        self._progress.reach(RankPhase.SAMPLE)
        logits = self._model.compute_local_logits(hidden)
        if not layout.is_decode_only:
            for on_logits in self._hooks.on_logits:
                on_logits(step, inputs, hidden, logits)
        return self._sampler.sample(logits, layout.sampled_rows, inputs.sampled_positions)

    def _finish(self, step: PendingStep, inputs: StepInputs | None, sampled: Sampled) -> None:
        """Begin to copy the step's results to the host; there are no ``inputs`` if it was replayed."""
        token_ids, logprobs = sampled
        if token_ids is not None:
            step.token_ids = self._readback.start(token_ids)
        if logprobs is not None:
            step.logprobs = logprobs.to_host(step.fetch)
        for on_sampled in self._hooks.on_sampled:
            on_sampled(step, inputs, token_ids)

    def _room(self, num_tokens: int) -> torch.Tensor | None:
        return next((state_room(num_tokens) for state_room in self._hooks.state_room), None)

    def _keep_rows(self, rows: torch.Tensor) -> Callable[[], None]:
        kept = [keep_rows(rows) for keep_rows in self._hooks.keep_rows]

        def put_back() -> None:
            for one in kept:
                one()

        return put_back
