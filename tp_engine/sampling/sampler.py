"""The sampler: one new token per row, without waiting for the device.

::

    logits -> grammar                                                                                  (masked rows)
           -> fp32 -> allowed ids -> logit_bias -> min_tokens -> repetition -> frequency, presence      (edited rows)
           -> argmax where temperature is 0
           -> / temperature -> top_k -> top_p -> min_p -> argmax of logits + Gumbel noise               (the others)

Log-probabilities come from the raw logits.  A batch that is all greedy and unedited costs one argmax.
"""

from __future__ import annotations

import torch

from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray
from tp_engine.sampling.chunks import row_chunks
from tp_engine.sampling.filters import draw
from tp_engine.sampling.groups import StepGroups, StepPlanner, Way
from tp_engine.sampling.logprobs import LogprobTensors, score_rows
from tp_engine.sampling.noise import noise_keys
from tp_engine.sampling.processors import edited_logits, masked_logits, record_tokens
from tp_engine.sampling.ranking import row_argmax
from tp_engine.sampling.state import SamplingState


class Sampler:
    """Samples the rows of ``state``, whose rank has the whole vocabulary."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._planner = StepPlanner(state)
        self._vocab_ids = torch.arange(state.vocab_size, dtype=torch.int32, device=state.device)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Token ids (n,) int32 on the device, and log-probabilities if any row asks for them.

        ``logits`` (n, vocab), any float type, are left unchanged but for masked rows.  On the host: ``rows`` (n,), each
        once, and ``positions`` (n,), the index that the new token will have in its sequence.  Logprob rows that did not
        ask hold zeros.
        """
        state, raw = self._state, logits
        assert logits.shape == (len(rows), state.vocab_size), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        logits = masked_logits(logits, rows, state)
        if state.is_plain[rows].all():
            return row_argmax(logits).to(torch.int32), None
        plan = self._planner.plan(rows, positions)
        tokens = (
            row_argmax(logits).to(torch.int32) if plan.is_plain_greedy else self._mixed(logits, plan, rows, positions)
        )
        record_tokens(tokens, plan, state)
        if plan.scored is None:
            return tokens, None
        wanted = raw if len(plan.scored) == len(rows) else raw.index_select(0, plan.scored)
        return tokens, score_rows(wanted, tokens, plan)

    def _mixed(self, logits: torch.Tensor, plan: StepGroups, rows: IntArray, positions: IntArray) -> torch.Tensor:
        edited = edited_logits(logits, plan, self._state)
        keys = upload(noise_keys(self._state.seed[rows], positions), logits.device) if plan.draws else None
        tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        for group in plan.groups:
            for start, stop in row_chunks(len(group.members), logits.shape[1], logits.device):
                part, source = group.part(start, stop), group.logits_of(logits, edited, start, stop)
                if part.way is Way.GREEDY:
                    drawn = row_argmax(source).to(torch.int32)
                else:
                    assert keys is not None
                    own_keys = keys.index_select(0, part.members)
                    drawn = draw(source.to(torch.float32), part, own_keys, self._vocab_ids)
                tokens.index_copy_(0, part.members, drawn)
        return tokens
