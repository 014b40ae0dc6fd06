"""The persistent batch: what a rank remembers of every row, and the inputs of a step made from it.

Per row, changed only by plans::

    token_ids    device           prompt, then generated tokens; written by the sampler, read by the next step
    block_table  host and device  block ids in order
    num_computed host and device  tokens whose K/V is in the cache; each side counts decode steps for itself
    num_prompt   host             tokens of the prompt

The inputs of decodes are made by the device from these tables, in every step (decode_batch.py); those of prefills by
the host.  A step's inputs are the decodes', then the prefills'.  The host never needs the value of a generated token,
so a step can be prepared before the last one has ended.
"""

from __future__ import annotations

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.decode_inputs import DecodeInputs, RowTables
from tp_engine.layers.upload import upload
from tp_engine.plan import Admission, IntArray, StepPlan
from tp_engine.slots import slots_for
from tp_engine.units import ceil_div
from tp_engine.worker.batch_layout import BatchLayout, make_layout
from tp_engine.worker.decode_batch import DecodeBatch
from tp_engine.worker.mirrored import MirroredTable
from tp_engine.worker.step_inputs import InputPart, StepInputs


class InputBatch:
    """Owner of the rows.  ``apply`` takes a plan's changes, ``prepare`` makes its inputs, ``advance`` ends the step."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._row_stride = max_model_len + 1  # a token sampled at the very end has a place, though nobody reads it
        self._token_ids = torch.zeros((max_num_seqs, self._row_stride), dtype=torch.int32, device=device)
        self._flat_token_ids = self._token_ids.view(-1)
        self._last_decodes: BatchLayout | None = None
        self._block_table = MirroredTable((max_num_seqs, ceil_div(max_model_len, block_size)), device)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._computed = MirroredTable((max_num_seqs,), device)
        self.num_computed = self._computed.host
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self.decodes = DecodeBatch(self.row_tables(), max_num_seqs)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        own = (self._token_ids, self._block_table.device, self._computed.device)
        return sum(tensor.nbytes for tensor in own) + self.decodes.num_bytes

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
        layout = self._layout_of(plan)
        seq_lens = self.num_computed[layout.rows] + layout.query_lens
        if not layout.is_decode_only:
            return self._with_prefills(layout, seq_lens)
        inputs = self._prepare_decodes(layout.rows)
        return StepInputs(
            layout=layout,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=self.decodes.metadata(inputs, seq_lens),
            sampled_positions=seq_lens,
        )

    def _with_prefills(self, layout: BatchLayout, seq_lens: IntArray) -> StepInputs:
        """The inputs of the decodes, if there are any, then those of the prefills, whose chunks end at ``seq_lens``."""
        first = layout.num_decodes
        num_blocks = ceil_div(int(seq_lens.max()), self._block_size)
        part = self._prefill_part(layout, seq_lens[first:], num_blocks)
        if first:
            part = self._decode_part(layout.rows[:first], num_blocks).then(part)
        is_sampled = layout.samples[first:]
        rows, ends = layout.prefill_rows[is_sampled], seq_lens[first:][is_sampled]
        return StepInputs(
            layout=layout,
            input_ids=part.input_ids,
            positions=part.positions,
            attention=AttentionMetadata(
                num_decodes=first,
                slot_mapping=part.slot_mapping,
                block_table=part.block_table,
                seq_lens=part.seq_lens,
                query_start=layout.query_start,
                host_query_lens=layout.query_lens,
                host_seq_lens=seq_lens,
                is_padded=False,
            ),
            sampled_positions=seq_lens[layout.samples],
            prefill_places=upload(rows * np.int64(self._row_stride) + ends, self._device) if len(rows) else None,
        )

    def _prepare_decodes(self, rows: IntArray) -> DecodeInputs:
        """Made by the device, from what it knows of ``rows``."""
        self.decodes.set_rows(rows, len(rows))
        return self.decodes.prepare(len(rows))

    def _decode_part(self, rows: IntArray, num_blocks: int) -> InputPart:
        inputs = self._prepare_decodes(rows)
        return InputPart(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table[:, :num_blocks],
        )

    def _prefill_part(self, layout: BatchLayout, ends: IntArray, num_blocks: int) -> InputPart:
        """Made by the host: each chunk ends at one of ``ends`` (P,)."""
        device, chunks = self._device, layout.prefill_tokens
        positions = np.repeat(ends - chunks, chunks) + layout.offsets
        slots = slots_for(self._block_table.host, layout.token_rows, positions, self._block_size)
        places = layout.token_rows * self._row_stride + positions
        return InputPart(
            input_ids=self._flat_token_ids.index_select(0, upload(places, device)),
            positions=upload(positions.astype(np.int64), device),
            slot_mapping=upload(slots, device),
            seq_lens=upload(ends, device),
            block_table=self._block_table.device[:, :num_blocks].index_select(0, layout.prefill_index),
        )

    def following_tokens(self, row: int, first: int, count: int) -> torch.Tensor:
        """Token ids (count,) int32 of ``row`` from position ``first`` on."""
        return self._token_ids[row, first : first + count]

    def advance(self, inputs: StepInputs, sampled: torch.Tensor | None) -> None:
        """The step's tokens are computed; ``sampled`` (n,) int32 become the next known tokens of their rows."""
        layout, num_decodes = inputs.layout, inputs.layout.num_decodes
        if num_decodes:
            assert sampled is not None
            self.decodes.advance(num_decodes, sampled if layout.is_decode_only else sampled[:num_decodes])
            self.count_decodes(layout.rows[:num_decodes])
        if layout.is_decode_only:
            return
        self.num_computed[layout.prefill_rows] += layout.prefill_tokens
        self._computed.push(layout.prefill_rows)
        if inputs.prefill_places is not None:
            assert sampled is not None
            self._flat_token_ids.index_copy_(0, inputs.prefill_places, sampled[num_decodes:])

    def count_decodes(self, rows: IntArray) -> None:
        """The host's part of decodes that the device has advanced by itself."""
        if not self._computed.is_shared:
            self.num_computed[rows] += 1

    def _layout_of(self, plan: StepPlan) -> BatchLayout:
        """Kept from the last step that only decoded while the same rows decode."""
        if len(plan.prefill_rows):
            return make_layout(plan, self._device)
        last = self._last_decodes
        if last is None or not np.array_equal(last.rows, plan.decode_rows):
            self._last_decodes = last = make_layout(plan, self._device)
        return last
