"""Drafts of a step's next tokens, made by a draft head on every rank behind the sampling.

::

    the step's tokens    states of the model, the token behind each    -> the head stores K/V for all of them
    last right token     of each request                               -> draft 0
    next positions       the head's own output, the draft before       -> drafts 1, 2, ...

All of a step's tokens go through the head, in the step's own batch, so its K/V are as far as the model's.  Draft rows
(plan.py) are among them.  Which draft tokens of a request were right follows from integers that are equal on all ranks,
so the host waits for nothing.

A draft is the token that the head's logits give with the temperature of the request and the noise of the draft's own
position, with which the model samples there too: both choose alike as far as their logits do, at any temperature, and a
draft needs no probabilities.  Filters, penalties and masks are left out.

Drafts go to rank 0 with the step's result, and rank 0 alone puts them into a plan, as draft tokens in draft rows
(plan.py). K/V of drafts lie behind those of the request's tokens, in blocks that it has; where these end, so do its
drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.attention.base import AttentionMetadata, Backends
from tp_engine.distributed.collectives import Communicator
from tp_engine.layers.attention import Attention, forward_context, only
from tp_engine.layers.upload import upload_all
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.draft_head import DraftHead
from tp_engine.plan import PAD_SLOT, IntArray, StepPlan
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.noise import device_noise_keys, gumbel_noise
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.batch.draft_rows import places_in_runs
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import RunnerFeature, RunningStep

NO_DRAFT = -1
"""In the place of a draft: no draft follows in this row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """What the head reads of a step of N tokens, n of which are sampled from, once these are sampled.

    ``states`` (N, state_size) of the model; ``following`` (N,) int32, the token behind each; ``positions`` (N,) int64;
    ``wanted`` (n,) int64, the tokens that are sampled from, None: all; ``attention`` as for the model.
    """

    states: torch.Tensor
    following: torch.Tensor
    positions: torch.Tensor
    attention: Sequence[AttentionMetadata]
    wanted: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """What requests sample with: ``temperature`` (m, 1) float32, 0 for greedy ones, and ``seeds`` (m,) int64."""

    temperature: torch.Tensor
    seeds: torch.Tensor

    def scores(self, logits: torch.Tensor, positions: torch.Tensor, first_id: int) -> torch.Tensor:
        """Return ``logits`` (m, c) of tokens from ``first_id`` on, to be drafted at ``positions`` (m,), with noise."""
        ids = torch.arange(first_id, first_id + logits.shape[1], dtype=torch.int32, device=logits.device)
        is_greedy, plain = self.temperature == 0.0, logits.float()
        noise = gumbel_noise(ids, device_noise_keys(self.seeds, positions))
        return torch.where(is_greedy, plain, plain / self.temperature.masked_fill(is_greedy, 1.0) + noise)


class HeadDrafter(RunnerFeature):
    """A head with the rows of ``batch``, which sample by ``sampling``; its layer is in KV ``group``, for which
    ``backends[group]`` attends."""

    def __init__(
        self,
        head: DraftHead,
        backends: Backends,
        group: int,
        batch: InputBatch,
        sampling: SamplingState,
        communicator: Communicator,
    ) -> None:
        self._head, self._batch, self._sampling, self._communicator = head, batch, sampling, communicator
        self._backend, self._group, self._num_groups = backends[group], group, len(backends)
        self._tables = batch.row_tables()
        self._states = self._room = head.new_states(batch.max_num_seqs)

    def take_model(self, model: CausalLM) -> list[Attention]:
        if model.mtp is not None:  # a part of each model that runs
            self._head = model.mtp
        self._head.embed_as(model.embed_tokens)
        return self._head.own_attention

    def state_room(self, num_tokens: int) -> torch.Tensor:
        """Return the same place for all steps of up to ``max_num_seqs`` tokens, as recorded decodes need it."""
        fits = num_tokens <= len(self._states)
        self._room = self._states[:num_tokens] if fits else self._head.new_states(num_tokens)
        return self._room

    def on_sampled(self, step: RunningStep, inputs: StepInputs | None, token_ids: torch.Tensor | None) -> None:
        """Take in all of the step's tokens, and draft ``plan.num_drafts`` tokens behind each that was sampled.

        A collective.
        """
        computed = self._recorded(step.plan, token_ids) if inputs is None else self._launched(inputs, token_ids)
        self._room = self._states
        self._follow(step, computed, token_ids)

    def _launched(self, inputs: StepInputs, sampled: torch.Tensor | None) -> ComputedStep:
        return ComputedStep(
            states=self._room,
            following=self._tokens_behind(inputs, sampled),
            positions=inputs.positions,
            attention=inputs.attention,
            wanted=inputs.layout.wanted,
        )

    def _recorded(self, plan: StepPlan, sampled: torch.Tensor | None) -> ComputedStep:
        """Return a step that came from a recording; only decodes are recorded where there is a head."""
        assert sampled is not None
        decodes, rows = self._batch.decodes, plan.decode_rows
        inputs = decodes.inputs(len(rows))
        attention = decodes.metadata(inputs, self._batch.num_computed[rows])
        self._backend.prepare(attention[self._group])
        return ComputedStep(
            states=self._states[: len(rows)],
            following=sampled,
            positions=inputs.positions,
            attention=attention,
            wanted=None,
        )

    def _follow(self, running: RunningStep, step: ComputedStep, sampled: torch.Tensor | None) -> None:
        head, plan, wanted = self._head, running.plan, step.wanted
        drafts = plan.num_drafts > 0 and sampled is not None
        if not drafts:  # only K/V are needed
            wanted = torch.zeros(1, dtype=torch.int64, device=step.positions.device)
        with forward_context(step.attention):
            out, fed = head(step.following, head.combine(step.states), step.positions, wanted)
        if not drafts or sampled is None:
            return
        rows = drafted_rows(plan)
        limits = self._num_slots(rows)
        on_rows, on_limits = upload_all((rows.astype(np.int64), limits), sampled.device)
        last = self._last_right(plan, sampled) if len(plan.draft_base_rows) else None
        position = only(last, only(step.wanted, step.positions))
        table = self._tables.block_table[self._group].index_select(0, on_rows)
        noise = self._noise(rows, sampled.device)
        tokens = self._draft(plan.num_drafts, only(last, out), only(last, fed), position, table, on_limits, noise)
        if self._communicator.info.is_first:
            wait = running.fetch([tokens])
            running.pending.drafts = lambda: by_row(rows, wait()[0])

    def _tokens_behind(self, inputs: StepInputs, sampled: torch.Tensor | None) -> torch.Tensor:
        """The token (N,) int32 behind each of the step's tokens, in the rows' table or just ``sampled`` (n,)."""
        if inputs.places is None:
            assert sampled is not None
            return sampled
        num_decodes = inputs.layout.num_decodes
        found = self._tables.token_ids.view(-1).index_select(0, inputs.places + 1)
        if sampled is not None:
            found[:num_decodes] = sampled[:num_decodes]
        return found

    def _num_slots(self, rows: IntArray) -> npt.NDArray[np.int64]:
        """Positions (m,) for which each of ``rows`` (m,) has slots."""
        room = self._batch.num_blocks[rows].astype(np.int64) * self._tables.block_size
        return np.minimum(room, self._tables.token_ids.shape[1] - 1)

    def _noise(self, rows: IntArray, device: torch.device) -> DraftNoise | None:
        """What ``rows`` (m,) sample with; None if all are greedy."""
        temperature = self._sampling.temperature[rows]
        if not temperature.any():
            return None
        return DraftNoise(*upload_all((temperature[:, np.newaxis], self._sampling.seed[rows].view(np.int64)), device))

    def _last_right(self, plan: StepPlan, sampled: torch.Tensor) -> torch.Tensor:
        """For each request (m,) int64 the place in ``sampled`` of its last token that counts."""
        chains, num_right = right_draft_rows(plan, sampled)
        last = chains.gather(1, num_right)[:, 0]
        return torch.cat((last, torch.arange(len(plan.decode_rows), len(sampled), device=last.device)))

    def _draft(
        self,
        count: int,
        out: torch.Tensor,
        fed: torch.Tensor,
        position: torch.Tensor,
        table: torch.Tensor,
        limits: torch.Tensor,
        noise: DraftNoise | None,
    ) -> torch.Tensor:
        """(m, count) int32, from what the head gave at ``position`` (m,); requests have ``limits`` (m,) slots."""
        tokens, found = self._best(out, position, noise), []
        is_open = torch.ones_like(tokens, dtype=torch.bool)
        for _ in range(count - 1):
            found.append(tokens.masked_fill(~is_open, NO_DRAFT))
            position = position + 1
            is_open = position < limits
            position = torch.minimum(position, limits - 1)
            with forward_context([self._metadata(position, is_open, table)] * self._num_groups):
                out, fed = self._head(tokens, fed, position)
            tokens = self._best(out, position, noise)
        return torch.stack((*found, tokens.masked_fill(~is_open, NO_DRAFT)), 1)

    def _metadata(self, position: torch.Tensor, is_open: torch.Tensor, table: torch.Tensor) -> AttentionMetadata:
        """Decodes at ``position`` (m,), which store K/V where it ``is_open``."""
        size, count = self._tables.block_size, len(position)
        block = table.gather(1, (position // size)[:, None])[:, 0].to(torch.int64)
        lengths = (position + 1).to(torch.int32)
        metadata = AttentionMetadata(
            num_decodes=count,
            slot_mapping=(block * size + position % size).masked_fill_(~is_open, PAD_SLOT),
            block_table=table,
            seq_lens=lengths,
            query_start=self._batch.decodes.inputs(count).query_start,
            host_query_lens=np.ones(count, dtype=np.int32),
            host_seq_lens=self._host_lengths(lengths),
        )
        self._backend.prepare(metadata)
        return metadata

    def _host_lengths(self, lengths: torch.Tensor) -> IntArray:
        """``lengths`` on the host; kernels that can be recorded read the device's, so it does not wait for these."""
        if lengths.device.type != "cpu" and self._backend.can_capture_decodes:
            return np.zeros(len(lengths), dtype=np.int32)
        found: IntArray = lengths.cpu().numpy()
        return found

    def _best(self, out: torch.Tensor, position: torch.Tensor, noise: DraftNoise | None) -> torch.Tensor:
        """The best token (m,) int32 behind each of ``out`` (m, hidden), whose K/V are at ``position`` (m,): the token
        behind the next one.  A collective."""
        lm_head = self._head.lm_head
        own, logits = lm_head.slice, lm_head(out)[:, : lm_head.slice.num_ids]
        if noise is not None and own.num_ids:
            logits = noise.scores(logits, position + 2, own.first)
        share = vocab_parallel.greedy_share(logits, own)
        (stack,) = vocab_parallel.exchange(self._communicator, [share])
        return self._head.tokens_of(vocab_parallel.merge_best(stack))


def drafted_rows(plan: StepPlan) -> IntArray:
    """Return the rows (m,) of the requests that the step samples, without draft rows, in batch order."""
    num_own = len(plan.decode_rows) - len(plan.draft_base_rows)
    return np.concatenate((plan.decode_rows[:num_own], plan.prefill_rows[plan.prefill_samples]))


def right_draft_rows(plan: StepPlan, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which draft tokens of a step with draft rows were right, by ``sampled`` (n,); nothing waits for it.

    Returns for each request that decodes the places in ``sampled`` of its own token, then of its draft rows' (m, 1 +
    most) int64, those behind the last draft row arbitrary; and the number of its draft tokens that were right (m, 1)
    int64.
    """
    num_decodes, num_draft_rows = len(plan.decode_rows), len(plan.draft_base_rows)
    num_own, places = num_decodes - num_draft_rows, places_in_runs(plan.draft_base_rows)
    index_of = np.zeros(int(plan.decode_rows.max()) + 1, dtype=np.int64)
    index_of[plan.decode_rows[:num_own]] = np.arange(num_own)
    owners, most = index_of[plan.draft_base_rows], int(places.max()) + 1
    chains = np.repeat(np.arange(num_own)[:, np.newaxis], most + 1, axis=1)
    chains[owners, places + 1] = np.arange(num_own, num_decodes)
    draft_tokens = np.full((num_own, most), NO_DRAFT, dtype=np.int32)
    draft_tokens[owners, places] = plan.draft_tokens
    on_chains, on_drafts = upload_all((chains, draft_tokens), sampled.device)
    return on_chains, (sampled[on_chains[:, :-1]] == on_drafts).cumprod(1).sum(1, keepdim=True)


def by_row(rows: IntArray, tokens: IntArray) -> dict[int, IntArray]:
    """Return for each of ``rows`` (m,) its ``tokens`` (m, count) up to the first ``NO_DRAFT``."""
    counts = (tokens != NO_DRAFT).sum(1).tolist()
    return {row: own[:count] for row, own, count in zip(rows.tolist(), tokens, counts, strict=True)}
