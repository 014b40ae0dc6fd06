"""What drafts the next tokens of a step's rows on the ranks, behind the sampling: the interface, and what all have.

::

    drafter           drafts                                                          file
    HeadDrafter       by a draft head, from the model's states                        head_drafter.py

Drafts go to rank 0 with the step's result, and rank 0 alone puts them into a plan, as guesses in lanes (plan.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from tp_engine.layers.attention import Attention
from tp_engine.layers.upload import upload_all
from tp_engine.models.causal_lm import CausalLM
from tp_engine.plan import Drafts, IntArray, StepPlan
from tp_engine.sampling.logprobs import Fetch
from tp_engine.worker.batch.lanes import places_in_runs
from tp_engine.worker.batch.step_inputs import StepInputs

NO_DRAFT = -1
"""In the place of a draft: no draft follows in this row."""

Pending: TypeAlias = Callable[[], dict[int, Drafts]]
"""Waits for the drafts of each row."""


class Drafter(ABC):
    """Drafts behind the rows of an ``InputBatch``.  Only a drafter with layers of its own reads the model's states."""

    def take_model(self, model: CausalLM) -> list[Attention]:
        """Draft for ``model`` from now on; returns the drafter's layers with K/V, bound behind the model's."""
        return []

    @property
    def decode_states(self) -> torch.Tensor | None:
        """Where recorded decodes leave the model's states, (max_num_seqs, state_size)."""
        return None

    def room(self, num_tokens: int) -> torch.Tensor | None:
        """Where a step of ``num_tokens`` leaves the model's states."""
        return None

    @abstractmethod
    def follow(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        states: torch.Tensor | None,
        sampled: torch.Tensor | None,
        fetch: Fetch,
    ) -> Pending | None:
        """Take in the step of ``inputs``, which left ``states`` (N, state_size) in the drafter's room and got
        ``sampled`` (n,), and draft ``plan.num_drafts`` tokens behind each request that was sampled.

        Returns on rank 0, if there are drafts, a function that waits for them.  A collective.
        """

    @abstractmethod
    def follow_recorded(self, plan: StepPlan, sampled: torch.Tensor | None, fetch: Fetch) -> Pending | None:
        """As ``follow``, of a step that came from a recording."""


def drafted_rows(plan: StepPlan) -> IntArray:
    """The rows (m,) of the requests that the step samples, without lanes, in batch order."""
    num_own = len(plan.decode_rows) - len(plan.lane_rows)
    return np.concatenate((plan.decode_rows[:num_own], plan.prefill_rows[plan.prefill_samples]))


def right_lanes(plan: StepPlan, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which guesses of a step with lanes were right, by ``sampled`` (n,); nothing waits for it.

    Returns for each request that decodes the places in ``sampled`` of its own token, then of its lanes' (m, 1 + most)
    int64, those behind the last lane arbitrary; and the number of its guesses that were right (m, 1) int64.
    """
    num_decodes, num_lanes = len(plan.decode_rows), len(plan.lane_rows)
    num_own, places = num_decodes - num_lanes, places_in_runs(plan.lane_rows)
    index_of = np.zeros(int(plan.decode_rows.max()) + 1, dtype=np.int64)
    index_of[plan.decode_rows[:num_own]] = np.arange(num_own)
    owners, most = index_of[plan.lane_rows], int(places.max()) + 1
    chains = np.repeat(np.arange(num_own)[:, np.newaxis], most + 1, axis=1)
    chains[owners, places + 1] = np.arange(num_own, num_decodes)
    guesses = np.full((num_own, most), NO_DRAFT, dtype=np.int32)
    guesses[owners, places] = plan.lane_tokens
    on_chains, on_guesses = upload_all((chains, guesses), sampled.device)
    return on_chains, (sampled[on_chains[:, :-1]] == on_guesses).cumprod(1).sum(1, keepdim=True)


def by_row(rows: IntArray, tokens: IntArray, matched: IntArray) -> dict[int, Drafts]:
    """For each of ``rows`` (m,) its ``tokens`` (m, count) up to the first ``NO_DRAFT``, and how many were ``matched``
    (m,)."""
    counts = (tokens != NO_DRAFT).sum(1).tolist()
    return {
        row: Drafts(own[:count], length)
        for row, own, count, length in zip(rows.tolist(), tokens, counts, matched.tolist(), strict=True)
    }
