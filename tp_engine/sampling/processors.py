"""The processors of a step, applied to this rank's slice of the logits: masks, token edits, then penalties."""

from __future__ import annotations

import torch

from tp_engine.plan import IntArray
from tp_engine.sampling.groups import StepGroups
from tp_engine.sampling.state import SamplingState


def masked_logits(logits: torch.Tensor, rows: IntArray, state: SamplingState) -> torch.Tensor:
    """``logits`` (n, width) of ``rows`` (n,) under the step's masks; a copy only where somebody wants them raw too."""
    if not state.masks.any_of(rows):
        return logits
    return state.masks.apply(logits, rows, in_place=bool((state.num_logprobs[rows] < 0).all()))


def edited_logits(logits: torch.Tensor, plan: StepGroups, state: SamplingState) -> torch.Tensor | None:
    """A float32 copy (e, width) of the rows of ``logits`` (n, width) that need a processor, processed; None if none."""
    if plan.edited is None:
        return None
    edited = logits.index_select(0, plan.edited).to(torch.float32)
    if plan.edits is not None:
        plan.edits.apply(edited)
    if plan.penalised is not None:
        state.penalties.apply(edited, plan.penalised)
    return edited


def record_tokens(token_ids: torch.Tensor, plan: StepGroups, state: SamplingState) -> None:
    """Count the sampled ``token_ids`` (n,) of penalised rows."""
    if plan.penalised is not None and plan.penalised_members is not None:
        state.penalties.record(plan.penalised.rows, token_ids.index_select(0, plan.penalised_members))
