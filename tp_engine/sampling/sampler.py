"""The sampler: one new token per row, without waiting for the device.

::

    logits -> fp32 -> allowed ids -> logit_bias -> min_tokens -> repetition -> frequency, presence      (edited rows)
           -> argmax where temperature is 0
           -> / temperature -> top_k -> top_p -> min_p -> argmax of logits + Gumbel noise               (the others)

Log-probabilities come from the raw logits.  A batch that is all greedy and unedited costs one argmax.
"""

from __future__ import annotations

import torch

from tp_engine.layers.upload import upload
from tp_engine.plan import BoolArray, IntArray
from tp_engine.sampling.chunks import row_chunks
from tp_engine.sampling.filters import draw_any, draw_nucleus, draw_ranked, row_argmax
from tp_engine.sampling.groups import RowGroup, StepGroups, Way, plan_groups
from tp_engine.sampling.logprobs import LogprobTensors, logprobs_of, spread
from tp_engine.sampling.noise import noise_keys
from tp_engine.sampling.state import SamplingState


class Sampler:
    """Samples the rows of ``state``."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._vocab_ids = torch.arange(state.vocab_size, dtype=torch.int32, device=state.device)
        self._plan_key: tuple[int, bytes, bytes] | None = None
        self._plan: StepGroups | None = None

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Token ids (n,) int32 on the device, and log-probabilities if any row asks for them.

        ``logits`` (n, vocab), any float type, left unchanged.  On the host: ``rows`` (n,), each once, and ``positions``
        (n,), the index that the new token will have in its sequence.  Logprob rows that did not ask hold zeros.
        """
        state = self._state
        assert logits.shape == (len(rows), state.vocab_size), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        if state.is_plain[rows].all():
            return row_argmax(logits).to(torch.int32), None
        is_short = positions - state.num_prompt_tokens[rows] < state.min_tokens[rows]
        plan = self._plan_for(rows, is_short)
        tokens = (
            row_argmax(logits).to(torch.int32) if plan.is_plain_greedy else self._mixed(logits, plan, rows, positions)
        )
        if plan.penalised is not None and plan.penalised_members is not None:
            state.penalties.record(plan.penalised.rows, tokens.index_select(0, plan.penalised_members))
        return tokens, _score(logits, tokens, plan)

    def _plan_for(self, rows: IntArray, is_short: BoolArray) -> StepGroups:
        key = (self._state.version, rows.tobytes(), is_short.tobytes())
        if self._plan is None or key != self._plan_key:
            self._plan, self._plan_key = plan_groups(self._state, rows, is_short), key
        return self._plan

    def _mixed(self, logits: torch.Tensor, plan: StepGroups, rows: IntArray, positions: IntArray) -> torch.Tensor:
        edited = self._edit(logits, plan)
        keys = upload(noise_keys(self._state.seed[rows], positions), logits.device) if plan.draws else None
        tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        for group in plan.groups:
            source = edited if group.edited else logits
            assert source is not None
            for start, stop in row_chunks(len(group.members), logits.shape[1], logits.device):
                part = group.part(start, stop)
                tokens.index_copy_(0, part.members, self._draw(source, part, start, keys))
        return tokens

    def _edit(self, logits: torch.Tensor, plan: StepGroups) -> torch.Tensor | None:
        """A float32 copy (e, vocab) of the rows that need a processor, processed."""
        if plan.edited is None:
            return None
        edited = logits.index_select(0, plan.edited).to(torch.float32)
        if plan.edits is not None:
            plan.edits.apply(edited)
        if plan.penalised is not None:
            self._state.penalties.apply(edited, plan.penalised)
        return edited

    def _draw(self, source: torch.Tensor, part: RowGroup, start: int, keys: torch.Tensor | None) -> torch.Tensor:
        """Token ids (m,) int32 of one part of a group; it begins at ``start`` where the group is all of ``source``."""
        num_rows = len(part.members)
        logits = source[start : start + num_rows] if part.source is None else source.index_select(0, part.source)
        if part.way is Way.GREEDY:
            return row_argmax(logits).to(torch.int32)
        assert keys is not None
        logits, own_keys = logits.to(torch.float32), keys.index_select(0, part.members)
        if part.way is Way.ANY:
            return draw_any(logits, part, own_keys, self._vocab_ids).to(torch.int32)
        if part.way is Way.NUCLEUS:
            return draw_nucleus(logits, part, own_keys)
        count = part.largest_top_k if part.way is Way.RANKED else self._state.vocab_size
        return draw_ranked(logits, part, own_keys, count)


def _score(logits: torch.Tensor, tokens: torch.Tensor, plan: StepGroups) -> LogprobTensors | None:
    """Log-probabilities for the rows that ask, zeros for the others."""
    if plan.scored is None:
        return None
    if len(plan.scored) == len(tokens):
        return logprobs_of(logits, tokens, plan.num_logprobs)
    scored = logprobs_of(logits.index_select(0, plan.scored), tokens.index_select(0, plan.scored), plan.num_logprobs)
    return spread(scored, plan.scored, len(tokens))
