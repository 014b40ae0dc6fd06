"""Runs plans on one rank's device: apply the changes, run one forward pass, sample together with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from tp_engine.attention.base import Backends, prepare_groups
from tp_engine.layers.adapters import adapting
from tp_engine.layers.attention import forward_context
from tp_engine.models.causal_lm import CausalLM
from tp_engine.plan import StepPlan
from tp_engine.progress import RankPhase, RankProgress
from tp_engine.ranks.collectives import Communicator
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.sampler import make_sampler, recorded_sampler
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.adapters import RankAdapters
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.padded_batch import StepSize, StepSizes
from tp_engine.worker.batch.row_states import RowStates
from tp_engine.worker.batch.step_inputs import StepInputs, digest_inputs
from tp_engine.worker.drafters.drafter import Drafter
from tp_engine.worker.memory.kv_cache import KvBlocks
from tp_engine.worker.profiling import Named, unnamed
from tp_engine.worker.recorded.captured_decodes import CapturedDecodes, Recorder
from tp_engine.worker.recorded.captured_prompts import CapturedPrompts
from tp_engine.worker.results.output_watch import OutputWatch
from tp_engine.worker.results.pooled_rows import PooledRows, PooledTensors
from tp_engine.worker.results.prompt_scores import ScoredPrompts
from tp_engine.worker.results.readback import Check, PendingStep, Readback, never_fails
from tp_engine.worker.tiers.host_tier import HostTier

NoteInputs: TypeAlias = Callable[[int, int], None]
"""Receives the digest of each step's inputs: ``note_inputs(step_id, digest)``."""


class ModelRunner:
    """One rank's model, persistent batch, KV cache (``blocks``, and a host ``tier`` if there is one) and sampler.

    ``states`` are the rows' recurrent ones, if some layers have one; ``adapters`` what the model takes of these, if it
    takes any; ``drafter`` guesses behind each step; ``watch`` looks at the outputs.  ``check`` raises if another rank
    has ended, while this one waits for its device.

    ``backends`` has one entry per group of layers (``kv_layout``), as the tables of ``batch``.  ``named`` names the
    parts of a step for profilers.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        backends: Backends,
        batch: InputBatch,
        blocks: KvBlocks,
        communicator: Communicator,
        sampling: SamplingState,
        progress: RankProgress,
        note_inputs: NoteInputs | None = None,
        tier: HostTier | None = None,
        states: RowStates | None = None,
        adapters: RankAdapters | None = None,
        drafter: Drafter | None = None,
        watch: OutputWatch | None = None,
        check: Check = never_fails,
    ) -> None:
        self._model = model
        self._backends = backends
        self._batch = batch
        self.blocks, self.tier, self.states, self.adapters = blocks, tier, states, adapters
        self._communicator, self._drafter, self._watch = communicator, drafter, watch or OutputWatch()
        self._sampling = sampling
        self._progress = progress
        self._note_inputs = note_inputs
        self._sampler = make_sampler(sampling, communicator)
        self._readback = Readback(len(batch.num_prompt), blocks.raw.device, check)
        self._captured: CapturedDecodes | None = None
        self._prompts: CapturedPrompts | None = None
        self.named: Named = unnamed
        self._scored = ScoredPrompts(model, batch)
        self._pooled_rows = PooledRows(len(batch.num_prompt), model.lm_head.slice, communicator)

    @property
    def kv_memory(self) -> tuple[torch.Tensor, ...]:
        """The blocks of the cache and of the host tier, and the rows' states."""
        found = [self.blocks.raw]
        if self.tier is not None:
            found.append(self.tier.slots)
        if self.states is not None:
            found.append(self.states.raw)
        return tuple(found)

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with block tables of its own."""
        return len(self._backends)

    @property
    def model(self) -> CausalLM:
        """The model that the next step runs."""
        return self._model

    def take_model(self, model: CausalLM) -> None:
        """Run ``model`` from the next step on: it has the K/V and the states of the one before, and no recordings."""
        self.forget_captured()
        self._watch.forget()
        more = [] if self._drafter is None else self._drafter.take_model(model)
        self.blocks.bind([*model.attention_layers, *more])
        if self.states is not None:
            self.states.bind(model.state_layers)
        self._model = self._scored.model = model

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], recorder: Recorder) -> CapturedDecodes:
        """Record decode steps of each of ``sizes`` (rising) rows.

        A collective.  ``graph_plan`` says whether that works.
        """
        self._captured = CapturedDecodes(
            sizes,
            recorder,
            model=self._model,
            backends=self._backends,
            decodes=self._batch.decodes,
            sampler=recorded_sampler(self._sampler, self._sampling, self._communicator),
            states=self.states,
            head_states=None if self._drafter is None else self._drafter.decode_states,
        )
        return self._captured

    @torch.inference_mode()
    def capture_prompts(self, sizes: StepSizes, recorder: Recorder, part: Sequence[StepSize]) -> None:
        """Record those steps with prompts of ``sizes`` that are in ``part``.  As ``capture``, before it or after."""
        if self._prompts is None:
            self._prompts = CapturedPrompts(
                sizes,
                model=self._model,
                backends=self._backends,
                tables=self._batch.row_tables(),
                sampler=recorded_sampler(self._sampler, self._sampling, self._communicator),
            )
        self._prompts.record(recorder, part)

    def forget_captured(self) -> None:
        """Destroy the recordings, if there are any; from now on every step is launched."""
        for captured in (self._captured, self._prompts):
            if captured is not None:
                captured.close()
        self._captured = self._prompts = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        """Launch one step."""
        self._watch.settle()
        with self.named("apply"):
            self._apply(plan)
        if plan.num_tokens == 0:
            return PendingStep(step_id=plan.step_id)
        adapters = None if self.adapters is None or not self.adapters.are_used(plan) else self.adapters
        captured, prompts = (self._captured, self._prompts) if adapters is None else (None, None)
        if captured is not None and captured.holds(plan):
            return self._replay(plan, captured)
        if prompts is not None and (size := self._recorded_size(plan, prompts)) is not None:
            return self._replay_prompts(plan, prompts, size)
        with self.named("prepare"):
            inputs = self._prepare(plan)
        is_scored = not inputs.layout.is_decode_only and self._scored.any_of(inputs.layout.rows)
        grouped = None if adapters is None else adapters.group(inputs.layout, plan.rows_epoch)
        drafter, drafts = self._drafter, None
        states = None if drafter is None else drafter.room(len(inputs.input_ids))
        with self.named("model"), forward_context(inputs.attention), adapting(grouped):
            wanted = None if is_scored else inputs.layout.wanted
            hidden = self._model(inputs.input_ids, inputs.positions, wanted, states)
        with self.named("sample"):
            prompt_logprobs = self._scored.score(inputs, hidden) if is_scored else {}
            sampled = hidden.index_select(0, inputs.layout.logit_index) if is_scored else hidden
            token_ids, logprobs, pooled = self._sample(plan.step_id, inputs, sampled)
            self._batch.advance(inputs, token_ids)
            fetch = self._readback.fetch
            if drafter is not None:
                drafts = drafter.follow(plan, inputs, states, token_ids, fetch)
            return PendingStep(
                step_id=plan.step_id,
                token_ids=None if token_ids is None else self._readback.start(token_ids),
                logprobs=self._watch.to_host(logprobs, fetch),
                prompt_logprobs={row: found.to_host(fetch) for row, found in prompt_logprobs.items()},
                pooled=None if pooled is None else pooled.to_host(fetch),
                drafts=drafts,
            )

    def _prepare(self, plan: StepPlan) -> StepInputs:
        inputs = self._batch.prepare(plan)
        if self._note_inputs is not None:
            self._note_inputs(plan.step_id, digest_inputs(inputs))
        prepare_groups(self._backends, inputs.attention)
        return inputs

    def _replay(self, plan: StepPlan, captured: CapturedDecodes) -> PendingStep:
        """Run a step that only decodes from recordings."""
        rows = plan.decode_rows
        self._progress.reach(RankPhase.SAMPLE)
        with self.named("replay"):
            token_ids, logprobs = captured.run(rows, self._batch.num_computed[rows] + 1, plan.rows_epoch)
        self._batch.count_computed(rows)
        return self._replayed(plan, token_ids, logprobs)

    def _recorded_size(self, plan: StepPlan, prompts: CapturedPrompts) -> StepSize | None:
        """The recording for a step with prompts; None if it is launched, as where more than sampled tokens is read."""
        rows = plan.prefill_rows
        is_read = self._scored.any_of(rows) or self._pooled_rows.any_of(rows)
        return None if is_read else prompts.sizes.size_for(plan)

    def _replay_prompts(self, plan: StepPlan, prompts: CapturedPrompts, size: StepSize) -> PendingStep:
        """Run a step with prompts from the recording of ``size``."""
        self._progress.reach(RankPhase.SAMPLE)
        with self.named("replay"):
            token_ids, logprobs = prompts.run(plan, size, self._batch.num_computed)
        self._batch.count_computed(plan.decode_rows)
        self._batch.count_computed(plan.prefill_rows, plan.prefill_tokens)
        return self._replayed(plan, token_ids, logprobs)

    def _replayed(self, plan: StepPlan, token_ids: torch.Tensor | None, logprobs: LogprobTensors | None) -> PendingStep:
        drafter, fetch = self._drafter, self._readback.fetch
        return PendingStep(
            step_id=plan.step_id,
            token_ids=None if token_ids is None else self._readback.start(token_ids),
            logprobs=self._watch.to_host(logprobs, fetch),
            drafts=None if drafter is None else drafter.follow_recorded(plan, token_ids, fetch),
        )

    def _apply(self, plan: StepPlan) -> None:
        """The plan's changes, in its order: rows and their lanes, new blocks, moves, then copies."""
        self._batch.apply(plan)
        self._sampling.masks.set(plan.mask_rows, plan.masks)
        if len(plan.kept_rows):
            self._sampling.keep(plan.kept_rows, plan.kept_tokens)
        if len(plan.released):
            self._sampling.release(plan.released)
        if self.adapters is not None:
            self.adapters.apply(plan)
        for admission in plan.admitted:
            self._scored.admit(admission.row, admission.sampling)
            self._pooled_rows.admit(admission.row, admission.sampling)
            self._sampling.admit(admission.row, admission.sampling, admission.token_ids, admission.num_prompt_tokens)
        if len(plan.lane_rows):
            self._sampling.mirror(plan.lanes, plan.lane_rows, plan.lane_tokens)
        if self.tier is not None and (plan.has_moves or self.tier.sees_all_plans):
            self._progress.reach(RankPhase.MOVE)
            self.tier.apply(plan)
            self._progress.back(RankPhase.STEP_BEGIN)
        if len(plan.copies):
            self.blocks.copy(plan.copies)
        if len(plan.state_copies):
            assert self.states is not None, "the model has no recurrent states"
            self.states.copy(plan.state_copies)

    def _sample(
        self, step_id: int, inputs: StepInputs, hidden: torch.Tensor
    ) -> tuple[torch.Tensor | None, LogprobTensors | None, PooledTensors | None]:
        """Sample after ``hidden`` (n, hidden); every rank gets the ids, rank 0 log-probabilities and what rows pool."""
        layout = inputs.layout
        if not len(layout.sampled_rows):
            return None, None, None
        self._progress.reach(RankPhase.SAMPLE)
        logits = self._model.compute_local_logits(hidden)
        pooled = None
        if not layout.is_decode_only:
            self._watch.look(step_id, hidden, logits)
            pooled = self._pooled_rows.collect(layout.sampled_rows, hidden, logits)
        return *self._sampler.sample(logits, layout.sampled_rows, inputs.sampled_positions), pooled
