"""Prompt lookup on rank 0's device: drafts are what followed a row's last tokens before, in its own text.

The rows' texts are on the device, and the search is one operation (``kernels/steps/ngram_drafts.py``), so rank 0's host
looks nothing up.  The other ranks have nothing to do: drafts reach them as guesses in a plan.
"""

from __future__ import annotations

import numpy as np
import torch

from tp_engine.kernels.ops import op
from tp_engine.layers.upload import upload_all
from tp_engine.plan import StepPlan
from tp_engine.sampling.logprobs import Fetch
from tp_engine.speculative import SpeculativeConfig
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.drafters.drafter import Drafter, Pending, by_row, drafted_rows, right_lanes


class NgramDrafter(Drafter):
    """Looks the texts of ``batch`` up, if the rank ``is_first``."""

    def __init__(self, config: SpeculativeConfig, batch: InputBatch, is_first: bool) -> None:
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max
        self._batch, self._tables, self._is_first = batch, batch.row_tables(), is_first

    def follow(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        states: torch.Tensor | None,
        sampled: torch.Tensor | None,
        fetch: Fetch,
    ) -> Pending | None:
        """See ``Drafter``."""
        return self.follow_recorded(plan, sampled, fetch)

    def follow_recorded(self, plan: StepPlan, sampled: torch.Tensor | None, fetch: Fetch) -> Pending | None:
        """See ``Drafter``; the batch's tables hold the step's tokens and count them."""
        if not plan.num_drafts or sampled is None or not self._is_first:
            return None
        rows, token_ids = drafted_rows(plan), self._tables.token_ids
        (on_rows,) = upload_all((rows.astype(np.int64),), sampled.device)
        lengths = self._tables.num_computed.index_select(0, on_rows) + 1
        most = int(self._batch.num_computed[plan.sampled_rows].max()) + 1
        if len(plan.lane_rows):
            self._append(plan, sampled)
            num_right = right_lanes(plan, sampled)[1][:, 0].to(torch.int32)
            lengths[: len(num_right)] += num_right
        find = op("ngram_drafts", sampled.device.type)
        tokens, matched = find(token_ids[:, :most], on_rows, lengths, self._shortest, self._longest, plan.num_drafts)
        wait = fetch([tokens, matched])
        return lambda: by_row(rows, *wait())

    def _append(self, plan: StepPlan, sampled: torch.Tensor) -> None:
        """Write what each lane sampled into its row's text.

        A wrong one is behind the row's known tokens, where the row's next tokens overwrite it before it is read.
        """
        token_ids, first = self._tables.token_ids, len(plan.decode_rows) - len(plan.lane_rows)
        places = plan.lane_rows.astype(np.int64) * token_ids.shape[1] + self._batch.num_computed[plan.lanes]
        (on_places,) = upload_all((places,), sampled.device)
        token_ids.view(-1).index_copy_(0, on_places, sampled[first : len(plan.decode_rows)])
