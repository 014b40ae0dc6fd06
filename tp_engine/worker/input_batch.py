"""The persistent batch: what a rank remembers of every row, and the inputs of a step made from it.

Per row, changed only by plans::

    token_ids    device           prompt, then generated tokens; written by the sampler, read by the next step
    block_table  host and device  block ids in order
    num_computed host             tokens whose K/V is in the cache
    num_prompt   host             tokens of the prompt

The host never needs the value of a generated token, so a step can be prepared before the last one has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.layers.upload import upload
from tp_engine.plan import Admission, IntArray, StepPlan
from tp_engine.slots import slots_for
from tp_engine.units import ceil_div
from tp_engine.worker.mirrored import MirroredTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of one forward pass over N tokens of B requests.

    ``input_ids`` and ``positions`` (N,) int64 on the device; ``logit_index`` (n,) int64 on the device: the last token
    of each sampled request.  On the host: ``sampled_rows`` and ``sampled_positions`` (n,), the place of each new token.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_index: torch.Tensor
    attention: AttentionMetadata
    rows: IntArray
    query_lens: IntArray
    sampled_rows: IntArray
    sampled_positions: IntArray


class InputBatch:
    """Owner of the rows.  ``apply`` takes a plan's changes, ``prepare`` makes its inputs, ``advance`` ends the step."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self.token_ids = torch.zeros((max_num_seqs, max_model_len), dtype=torch.int32, device=device)
        self._block_table = MirroredTable((max_num_seqs, ceil_div(max_model_len, block_size)), device)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Released rows first, then admissions, then new blocks (plan.py)."""
        self._num_blocks[plan.released] = 0
        for admission in plan.admitted:
            self._admit(admission)
        if len(plan.block_rows):
            self._append_blocks(plan.block_rows, plan.block_ids)

    def _admit(self, admission: Admission) -> None:
        row, num_tokens, num_blocks = admission.row, len(admission.token_ids), len(admission.block_ids)
        self.token_ids[row, :num_tokens] = upload(admission.token_ids, self._device)
        self.num_prompt[row] = admission.num_prompt_tokens
        self.num_computed[row] = admission.num_computed_tokens
        self._append_blocks(np.full(num_blocks, row, dtype=np.int32), admission.block_ids, start=0)

    def _append_blocks(self, rows: IntArray, block_ids: IntArray, start: int | None = None) -> None:
        """Append blocks to the tables of ``rows``, which are grouped by row; ``start`` overrides the column."""
        if not len(rows):
            return
        first_of_run = np.flatnonzero(np.diff(rows, prepend=-1))
        run_lengths = np.diff(first_of_run, append=len(rows))
        place_in_run = np.arange(len(rows)) - np.repeat(first_of_run, run_lengths)
        columns = (self._num_blocks[rows] if start is None else start) + place_in_run
        self._block_table.host[rows, columns] = block_ids
        self._num_blocks[rows[first_of_run]] = columns[first_of_run + run_lengths - 1] + 1
        self._block_table.push(rows, columns)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """The inputs of this step; a few array operations, whatever the number of rows."""
        rows = np.concatenate((plan.decode_rows, plan.prefill_rows))
        computed = self.num_computed[rows]
        if len(plan.prefill_rows):
            query_lens = np.concatenate((np.ones_like(plan.decode_rows), plan.prefill_tokens))
            token_rows, positions = self._spread(rows, computed, query_lens)
        else:
            query_lens, token_rows, positions = np.ones_like(rows), rows, computed
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        samples = np.concatenate((np.ones(len(plan.decode_rows), dtype=np.bool_), plan.prefill_samples))
        return self._inputs(rows, query_lens, query_start, token_rows, positions, computed + query_lens, samples, plan)

    @staticmethod
    def _spread(rows: IntArray, computed: IntArray, query_lens: IntArray) -> tuple[IntArray, IntArray]:
        """Row and position of each token of a mixed step."""
        starts = np.cumsum(query_lens) - query_lens
        offsets = np.arange(int(query_lens.sum()), dtype=np.int32) - np.repeat(starts, query_lens).astype(np.int32)
        return np.repeat(rows, query_lens), np.repeat(computed, query_lens) + offsets

    def _inputs(
        self,
        rows: IntArray,
        query_lens: IntArray,
        query_start: IntArray,
        token_rows: IntArray,
        positions: IntArray,
        seq_lens: IntArray,
        samples: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
        plan: StepPlan,
    ) -> StepInputs:
        device, num_blocks = self._device, ceil_div(int(seq_lens.max()), self._block_size)
        slots = slots_for(self._block_table.host, token_rows, positions, self._block_size)
        device_rows = upload(token_rows.astype(np.int64), device)
        device_positions = upload(positions.astype(np.int64), device)
        attention = AttentionMetadata(
            num_decodes=len(plan.decode_rows),
            slot_mapping=upload(slots.astype(np.int64), device),
            block_table=self._block_table.device[upload(rows.astype(np.int64), device), :num_blocks],
            seq_lens=upload(seq_lens, device),
            query_start=upload(query_start, device),
            host_query_lens=query_lens,
            host_seq_lens=seq_lens,
        )
        return StepInputs(
            input_ids=self.token_ids[device_rows, device_positions].long(),
            positions=device_positions,
            logit_index=upload(query_start[1:][samples].astype(np.int64) - 1, device),
            attention=attention,
            rows=rows,
            query_lens=query_lens,
            sampled_rows=rows[samples],
            sampled_positions=seq_lens[samples],
        )

    def advance(self, inputs: StepInputs, sampled: torch.Tensor | None) -> None:
        """The step's tokens are computed; ``sampled`` (n,) become the next known tokens of their rows."""
        self.num_computed[inputs.rows] += inputs.query_lens
        if sampled is None or not len(inputs.sampled_rows):
            return
        inside = inputs.sampled_positions < self.token_ids.shape[1]
        rows, positions = inputs.sampled_rows, inputs.sampled_positions
        if not inside.all():
            sampled = sampled[upload(np.flatnonzero(inside), self._device)]
            rows, positions = rows[inside], positions[inside]
        where = (upload(rows.astype(np.int64), self._device), upload(positions.astype(np.int64), self._device))
        self.token_ids.index_put_(where, sampled.to(torch.int32))
