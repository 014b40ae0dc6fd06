"""The persistent batch: what a rank remembers of every row, and the inputs of a step made from it.

Per row, changed only by plans::

    token_ids    device           prompt, then generated tokens; written by the sampler, read by the next step
    block_table  host and device  block ids in order
    num_computed host and device  tokens whose K/V is in the cache; each side counts decode steps for itself
    num_prompt   host             tokens of the prompt

Steps that only decode have their inputs made by the device (decode_batch.py), on CPUs by compiled code.  The host never
needs the value of a generated token, so a step can be prepared before the last one has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.decode_inputs import RowTables, has_decode_kernels
from tp_engine.layers.upload import upload
from tp_engine.plan import Admission, IntArray, StepPlan
from tp_engine.slots import slots_for
from tp_engine.units import ceil_div
from tp_engine.worker.batch_layout import BatchLayout, make_layout
from tp_engine.worker.decode_batch import DecodeBatch
from tp_engine.worker.mirrored import MirroredTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of one forward pass over N tokens, of which n are followed by a sampled one.

    On the device: ``input_ids`` (N,) int32, ``positions`` (N,) int64, ``sampled_places`` (n,) int64, where the new ids
    go in the flattened token table (None: the device knows).  On the host: ``sampled_positions`` (n,), the new tokens'
    positions.
    """

    layout: BatchLayout
    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    sampled_positions: IntArray
    sampled_places: torch.Tensor | None


class InputBatch:
    """Owner of the rows.  ``apply`` takes a plan's changes, ``prepare`` makes its inputs, ``advance`` ends the step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        decodes_on_device: bool | None = None,
    ) -> None:
        """``decodes_on_device`` None: where kernels make the inputs of decodes."""
        self._block_size = block_size
        self._device = device
        self._row_stride = max_model_len + 1  # a token sampled at the very end has a place, though nobody reads it
        self._token_ids = torch.zeros((max_num_seqs, self._row_stride), dtype=torch.int32, device=device)
        self._flat_token_ids = self._token_ids.view(-1)
        self._last_layout: BatchLayout | None = None
        self._block_table = MirroredTable((max_num_seqs, ceil_div(max_model_len, block_size)), device)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._computed = MirroredTable((max_num_seqs,), device)
        self.num_computed = self._computed.host
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        on_device = has_decode_kernels(device.type) if decodes_on_device is None else decodes_on_device
        self.decodes = DecodeBatch(self.row_tables(), max_num_seqs) if on_device else None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        own = (self._token_ids, self._block_table.device, self._computed.device)
        return sum(tensor.nbytes for tensor in own) + (0 if self.decodes is None else self.decodes.num_bytes)

    def row_tables(self) -> RowTables:
        """The rows as the device sees them."""
        return RowTables(
            token_ids=self._token_ids,
            num_computed=self._computed.device,
            block_table=self._block_table.device,
            block_size=self._block_size,
        )

    def apply(self, plan: StepPlan) -> None:
        """Released rows first, then admissions, then new blocks (plan.py)."""
        if len(plan.released):
            self._num_blocks[plan.released] = 0
        for admission in plan.admitted:
            self._admit(admission)
        if len(plan.block_rows):
            self._append_blocks(plan.block_rows, plan.block_ids)

    def _admit(self, admission: Admission) -> None:
        row, num_tokens, num_blocks = admission.row, len(admission.token_ids), len(admission.block_ids)
        self._token_ids[row, :num_tokens] = upload(admission.token_ids, self._device)
        self.num_prompt[row] = admission.num_prompt_tokens
        self.num_computed[row] = admission.num_computed_tokens
        self._computed.push(np.array([row]))
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
        layout, device = self._layout_of(plan), self._device
        if self.decodes is not None and layout.is_decode_only:
            return self._prepare_decodes(layout, self.decodes)
        computed = self.num_computed[layout.rows]
        positions, seq_lens = layout.positions(computed), computed + layout.query_lens
        places = layout.token_rows * self._row_stride + positions
        sampled_positions = seq_lens[layout.samples]
        num_blocks = ceil_div(int(seq_lens.max()), self._block_size)
        attention = AttentionMetadata(
            num_decodes=layout.num_decodes,
            slot_mapping=upload(
                slots_for(self._block_table.host, layout.token_rows, positions, self._block_size), device
            ),
            block_table=self._block_table.device[:, :num_blocks].index_select(0, layout.device_rows),
            seq_lens=upload(seq_lens, device),
            query_start=layout.query_start,
            host_query_lens=layout.query_lens,
            host_seq_lens=seq_lens,
            is_padded=False,
        )
        return StepInputs(
            layout=layout,
            input_ids=self._flat_token_ids.index_select(0, upload(places, device)),
            positions=upload(positions.astype(np.int64), device),
            attention=attention,
            sampled_positions=sampled_positions,
            sampled_places=upload(layout.sampled_rows * np.int64(self._row_stride) + sampled_positions, device),
        )

    def _prepare_decodes(self, layout: BatchLayout, decodes: DecodeBatch) -> StepInputs:
        """The same, made by the device."""
        seq_lens = self.num_computed[layout.rows] + 1
        decodes.set_rows(layout.rows, len(layout.rows))
        inputs = decodes.prepare(len(layout.rows))
        return StepInputs(
            layout=layout,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=decodes.metadata(inputs, seq_lens),
            sampled_positions=seq_lens,
            sampled_places=None,
        )

    def following_tokens(self, row: int, first: int, count: int) -> torch.Tensor:
        """Token ids (count,) int32 of ``row`` from position ``first`` on."""
        return self._token_ids[row, first : first + count]

    def advance(self, inputs: StepInputs, sampled: torch.Tensor | None) -> None:
        """The step's tokens are computed; ``sampled`` (n,) int32 become the next known tokens of their rows."""
        layout = inputs.layout
        if inputs.sampled_places is None:
            assert self.decodes is not None and sampled is not None
            self.decodes.advance(len(layout.rows), sampled)
            self.count_decodes(layout.rows)
            return
        self.num_computed[layout.rows] += layout.query_lens
        self._computed.push(layout.rows)
        if sampled is not None:
            self._flat_token_ids.index_copy_(0, inputs.sampled_places, sampled)

    def count_decodes(self, rows: IntArray) -> None:
        """The host's part of a decode step that the device has advanced by itself."""
        if not self._computed.is_shared:
            self.num_computed[rows] += 1

    def _layout_of(self, plan: StepPlan) -> BatchLayout:
        """Kept from the last step while the same rows decode."""
        last = self._last_layout
        is_same = last is not None and last.is_decode_only and not len(plan.prefill_rows)
        if last is None or not is_same or not np.array_equal(last.rows, plan.decode_rows):
            self._last_layout = last = make_layout(plan, self._device)
        return last
