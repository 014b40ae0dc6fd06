"""Drafts of a step's next tokens, made by a draft head on every rank after the sampling.

::

    the step's tokens    states of the model, the token after each     -> the head stores K/V for all of them
    last right token     of each request                               -> draft 0
    next positions       the head's own output, the draft before       -> drafts 1, 2, ...

All of a step's tokens go through the head, in the step's own batch, so its K/V are as far as the model's, and turn as
the model's do; a model's own head reads the rows of images where the token after is in one.  Draft rows are among
them.  Which draft tokens of a request were right follows from integers that are equal on all ranks, so the host
waits for nothing.

A draft is the token that the head's logits give with the temperature of the request and the noise of the draft's own
position, with which the model samples there too: both choose alike as far as their logits do, at any temperature, and a
draft needs no probabilities.  Filters, penalties and masks are left out.

Drafts go to rank 0 with the step's result, and rank 0 alone puts them into a plan, as draft tokens in draft rows.  K/V
of drafts lie after those of the request's tokens, in blocks that it has; where these end, so do its drafts.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.features.speculation.feature import BASE_ROWS, DRAFT_TOKENS, NUM_DRAFTS
from tp_engine.features.speculation.head_passes import HeadPasses
from tp_engine.layers.attention import Attention, forward_context, only
from tp_engine.layers.image_rows import seeing
from tp_engine.layers.upload import upload_all
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import IntArray, StepPlan
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.spare_rows import places_in_runs
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.graphs.recorder import Recorder
from tp_engine.worker.image_encoder import ImageEncoder
from tp_engine.worker.results.readback import PendingStep

Int64Array: TypeAlias = npt.NDArray[np.int64]

NO_DRAFT = -1
"""In the place of a draft token: none follows in this row."""


class HeadDrafter(RunnerFeature):
    """A head with the rows of ``batch``, run by ``passes``; ``is_first``: this is rank 0, which gets the drafts.  A
    step's ``images`` are the head's too."""

    def __init__(
        self, passes: HeadPasses, batch: InputBatch, *, is_first: bool, images: ImageEncoder | None = None
    ) -> None:
        self._passes, self._batch, self._is_first, self._images = passes, batch, is_first, images
        self._tables = batch.row_tables()
        self._room = passes.states

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.state_room.append(self.state_room)
        hooks.on_sampled.append(self.on_sampled)
        hooks.take_model.append(self.take_model)
        hooks.record.append(self.record)
        hooks.forget.append(self.forget)

    def take_model(self, model: LanguageModel) -> list[Attention]:
        passes = self._passes
        if model.mtp is not None:  # a part of each model that runs
            passes.head = model.mtp
        passes.head.serve(model.embed_tokens, model.attention_of)
        return passes.head.own_attention

    def record(self, size: int, recorder: Recorder) -> None:
        self._passes.record(size, recorder)

    def forget(self) -> None:
        self._passes.forget()

    def state_room(self, num_tokens: int) -> torch.Tensor:
        """Return the same place for all steps of up to ``max_decodes`` tokens, as recorded decodes need it."""
        states = self._passes.states
        self._room = states[:num_tokens] if num_tokens <= len(states) else self._passes.head.new_states(num_tokens)
        return self._room

    def on_sampled(self, step: PendingStep, inputs: StepInputs | None, token_ids: torch.Tensor | None) -> None:
        """Take in all of the step's tokens, and draft the plan's number of tokens after each that was sampled.

        A collective.
        """
        plan, states = step.plan, self._room
        if inputs is None:  # replayed; only decodes are recorded where there is a head
            assert token_ids is not None
            states, wanted = self._passes.states[: len(token_ids)], None
            positions = self._batch.decodes.inputs(len(token_ids)).positions
        else:
            wanted, positions = inputs.layout.wanted, inputs.positions
        self._room = self._passes.states
        drafts = NUM_DRAFTS.of(plan) > 0 and token_ids is not None
        given: Sequence[torch.Tensor] = ()
        if self._passes.head.keeps_kv:
            given = self._take_in(plan, inputs, states, token_ids, drafts)
        elif token_ids is not None:
            given = token_ids, only(wanted, states)
        if drafts and token_ids is not None:
            last = self._last_right(plan, token_ids) if len(BASE_ROWS.of(plan)) else None
            first, fed, position = (only(last, one) for one in (*given, only(wanted, positions)))
            self._draft(step, first, fed, position)

    def _take_in(
        self,
        plan: StepPlan,
        inputs: StepInputs | None,
        states: torch.Tensor,
        sampled: torch.Tensor | None,
        drafts: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Run the head on all tokens of the step; returns its outputs (n, hidden) of those sampled from if it
        ``drafts``, else it stores K/V alone."""
        passes, head = self._passes, self._passes.head
        if inputs is None:
            assert sampled is not None
            passes.take_in(sampled, drafts=drafts)
            return passes.out[: len(sampled)], passes.fed[: len(sampled)]
        images = None if self._images is None else self._images.of_step(plan, inputs, num_ahead=1)
        of_images = None if images is None else images.rotary_positions
        positions = inputs.rotary_positions if of_images is None else of_images
        with forward_context(inputs.attention), seeing(images):
            given = self._tokens_behind(inputs, sampled), head.combine(states), positions
            if drafts:
                out, fed = head(*given, inputs.layout.wanted)
                return out, fed
            head.store(*given)
        return ()

    def _tokens_behind(self, inputs: StepInputs, sampled: torch.Tensor | None) -> torch.Tensor:
        """The token (N,) int32 after each of the step's tokens, in the rows' table or just ``sampled`` (n,)."""
        if inputs.places is None:
            assert sampled is not None
            return sampled
        num_decodes = inputs.layout.num_decodes
        found = self._tables.token_ids.view(-1).index_select(0, inputs.places + 1)
        if sampled is not None:
            found[:num_decodes] = sampled[:num_decodes]
        return found

    def _last_right(self, plan: StepPlan, sampled: torch.Tensor) -> torch.Tensor:
        """For each request (m,) int64 the place in ``sampled`` of its last token that counts."""
        chains, num_right = right_draft_rows(plan, sampled)
        last = chains.gather(1, num_right)[:, 0]
        return torch.cat(
            (last, torch.arange(len(plan.decode_rows), len(sampled), device=last.device, dtype=torch.int64))
        )

    def _draft(self, step: PendingStep, first: torch.Tensor, fed: torch.Tensor, position: torch.Tensor) -> None:
        """Draft from what ``HeadPasses.draft`` needs, and send rank 0's host the drafts."""
        count, rows = NUM_DRAFTS.of(step.plan), drafted_rows(step.plan)
        limits = self._num_slots(rows)
        tokens = self._passes.draft(count, rows, limits, first, fed, position)
        if self._is_first:
            wait = step.fetch([tokens, position.clone()])  # its place is the next step's too
            step.drafts = lambda: by_row(rows, limits, wait())

    def _num_slots(self, rows: IntArray) -> Int64Array:
        """Positions (m,) for which each of ``rows`` (m,) has slots."""
        room = self._batch.num_blocks[rows].astype(np.int64) * self._tables.block_size
        return np.minimum(room, self._tables.token_ids.shape[1] - 1)


def drafted_rows(plan: StepPlan) -> IntArray:
    """Return the rows (m,) of the requests that the step samples, without draft rows, in batch order."""
    num_own = len(plan.decode_rows) - len(BASE_ROWS.of(plan))
    return np.concatenate((plan.decode_rows[:num_own], plan.prefill_rows[plan.prefill_samples]))


def right_draft_rows(plan: StepPlan, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which draft tokens of a step with draft rows were right, by ``sampled`` (n,); nothing waits for it.

    Returns for each request that decodes the places in ``sampled`` of its own token, then of its draft rows' (m, 1 +
    most) int64, those after the last draft row arbitrary; and the number of its draft tokens that were right (m, 1)
    int64.
    """
    num_decodes, num_draft_rows = len(plan.decode_rows), len(BASE_ROWS.of(plan))
    num_own, places = num_decodes - num_draft_rows, places_in_runs(BASE_ROWS.of(plan))
    index_of = np.zeros(int(plan.decode_rows.max()) + 1, dtype=np.int64)
    index_of[plan.decode_rows[:num_own]] = np.arange(num_own)
    owners, most = index_of[BASE_ROWS.of(plan)], int(places.max()) + 1
    chains = np.repeat(np.arange(num_own)[:, np.newaxis], most + 1, axis=1)
    chains[owners, places + 1] = np.arange(num_own, num_decodes)
    draft_tokens = np.full((num_own, most), NO_DRAFT, dtype=np.int32)
    draft_tokens[owners, places] = DRAFT_TOKENS.of(plan)
    on_chains, on_drafts = upload_all((chains, draft_tokens), sampled.device)
    return on_chains, (sampled[on_chains[:, :-1]] == on_drafts).cumprod(1).sum(1, keepdim=True)


def by_row(rows: IntArray, limits: Int64Array, fetched: Sequence[npt.NDArray[Any]]) -> dict[int, IntArray]:
    """Return the drafts of each of ``rows`` (m,), up to the row's ``limits`` (m,).

    ``fetched``: the drafts (m, count) and the positions (m,) at which the first ones' K/V are.
    """
    tokens, position = fetched
    counts = np.minimum(limits - position, tokens.shape[1]).tolist()
    return {row: own[:count] for row, own, count in zip(rows.tolist(), tokens, counts, strict=True)}
