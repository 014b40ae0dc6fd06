"""The persistent batch: what a rank remembers of every row, and the inputs of a step that follow from it.

Per row, changed only by plans::

    token_ids    device           prompt, then generated tokens; written by the sampler, read by the next step
    block_table  host and device  block ids in order, a table for each group of layers (kv_layout.py)
    num_computed host and device  tokens whose K/V is in the cache; each side counts decode steps for itself
    num_prompt   host             tokens of the prompt
    num_blocks   host             blocks in use of each of its tables
    rope_deltas  host and device  what decodes turn by, beyond their position; of models that turn by place

In every step the device makes the inputs of decodes from these tables (decode_batch.py), and the host makes those of
prefills.  A step's inputs are the decodes', then the prefills'.  The host never needs the value of a generated token,
so a step can be prepared before the last one has ended.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.steps.decode_inputs import RowTables, padded_room
from tp_engine.layers.upload import upload_all
from tp_engine.plan import Admission, IntArray, StepPlan
from tp_engine.system.units import ceil_div
from tp_engine.worker.batch.decode_batch import DecodeBatch
from tp_engine.worker.batch.spare_rows import MirroredTable, SpareRows, places_in_runs
from tp_engine.worker.batch.step_inputs import BatchLayout, SlotArray, StepInputs, make_layout, slots_for


class InputBatch:
    """Owner of the rows.  ``apply`` takes a plan's changes, ``prepare`` makes its inputs, ``advance`` ends the step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        num_spare_rows: int = 0,
        has_states: bool = False,
        turns_by_place: bool = False,
    ) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._device = device
        self._row_stride = max_model_len + 1  # room for a token sampled at the very end, which is never read
        self.max_num_seqs = max_num_seqs
        self.max_decodes = max(max_num_seqs, 1 + num_spare_rows)
        num_rows = max_num_seqs + num_spare_rows
        self._token_ids = torch.zeros((num_rows, self._row_stride), dtype=torch.int32, device=device)
        self._flat_token_ids = self._token_ids.view(-1)
        self._last_decodes: BatchLayout | None = None
        self._block_table = MirroredTable((num_groups, num_rows, ceil_div(max_model_len, block_size)), device)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self._computed = MirroredTable((num_rows,), device)
        self.num_computed = self._computed.host
        self.num_prompt = np.zeros(num_rows, dtype=np.int32)
        self._rope_deltas = MirroredTable((num_rows,), device) if turns_by_place else None
        self._spare_rows = SpareRows(self._token_ids, self._block_table, self._computed)
        self.decodes = DecodeBatch(
            self.row_tables(), self.max_decodes, first_spare=max_num_seqs if has_states and num_spare_rows else None
        )

    @property
    def num_bytes(self) -> int:
        tables = (self._block_table, self._computed, self._rope_deltas)
        own = [self._token_ids, *(table.device for table in tables if table is not None)]
        return sum(tensor.nbytes for tensor in own) + self.decodes.num_bytes

    def row_tables(self) -> RowTables:
        """Return the rows as the device sees them."""
        return RowTables(
            token_ids=self._token_ids,
            num_computed=self._computed.device,
            block_table=self._block_table.device,
            block_size=self._block_size,
            rope_deltas=None if self._rope_deltas is None else self._rope_deltas.device,
        )

    def apply(self, plan: StepPlan) -> None:
        """Apply released rows, admissions, and new blocks (plan.py)."""
        if len(plan.released):
            self.num_blocks[plan.released] = 0
        if plan.admitted:
            self._admit(plan.admitted)
            if self._rope_deltas is not None:
                self._set_deltas(plan)
        if len(plan.block_rows):
            self._append_blocks(plan.block_rows, plan.block_ids)

    def keep(self, rows: IntArray, tokens: IntArray) -> None:
        """``rows`` (n,), grouped, have one more computed token for each entry, after which ``tokens`` (n,) come."""
        self._spare_rows.keep(rows, tokens)

    def stand_for(self, spare_rows: IntArray, rows: IntArray, tokens: IntArray) -> None:
        """In this step the ``spare_rows`` (n,), the last of its decodes, stand for ``rows`` (n,), grouped, and read
        ``tokens`` (n,): the first of a row at the position after the row's own, the next one after that."""
        self._spare_rows.fill(spare_rows, rows, tokens, int(self.num_blocks[rows].max()))
        self.decodes.base_rows = rows
        if self._rope_deltas is not None:
            self._rope_deltas.host[spare_rows] = self._rope_deltas.host[rows]
            self._rope_deltas.push(spare_rows)

    def _set_deltas(self, plan: StepPlan) -> None:
        """An image takes more places than the text after it is turned by."""
        assert self._rope_deltas is not None
        rows, images = np.array([one.row for one in plan.admitted]), plan.images
        self._rope_deltas.host[rows] = 0
        np.add.at(self._rope_deltas.host, images[:, 0], images[:, 3:].max(axis=1, initial=0) - images[:, 2])
        self._rope_deltas.push(rows)

    def _admit(self, admitted: Sequence[Admission]) -> None:
        rows = np.array([admission.row for admission in admitted], dtype=np.int32)
        prompts = upload_all([admission.token_ids for admission in admitted], self._device)
        for row, admission, token_ids in zip(rows.tolist(), admitted, prompts, strict=True):
            self._token_ids[row, : len(token_ids)] = token_ids
            self.num_prompt[row] = admission.num_prompt_tokens
            self.num_computed[row] = admission.num_computed_tokens
        self._computed.push(rows)
        self.num_blocks[rows] = 0
        block_ids = [admission.block_ids for admission in admitted]
        counts = [len(ids) // self._num_groups for ids in block_ids]
        self._append_blocks(rows.repeat(counts), np.concatenate(block_ids))

    def _append_blocks(self, rows: IntArray, block_ids: IntArray) -> None:
        """Append a block to the table of each of ``rows`` (n,), which are grouped.

        ``block_ids`` (n x G,): each block's ids, group by group.
        """
        if not len(rows):
            return
        columns = self.num_blocks[rows] + places_in_runs(rows)
        self._block_table.host[:, rows, columns] = block_ids.reshape(len(rows), self._num_groups).T
        self.num_blocks[rows] = columns + 1  # of a row's entries numpy enters the last
        self._block_table.push(rows, columns)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Return the inputs of this step, in a few array operations for any number of rows."""
        layout = self._layout_of(plan)
        seq_lens = self.num_computed[layout.rows] + layout.query_lens
        if not layout.is_decode_only:
            return self._with_prefills(plan, layout, seq_lens)
        num_decodes = layout.num_decodes
        self.decodes.set_rows(plan, num_decodes)
        inputs = self.decodes.prepare(num_decodes)
        return StepInputs(
            layout=layout,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            rope_positions=inputs.rope_positions,
            attention=self.decodes.metadata(inputs, seq_lens),
            sampled_positions=seq_lens,
        )

    def _with_prefills(self, plan: StepPlan, layout: BatchLayout, seq_lens: IntArray) -> StepInputs:
        """The host makes the inputs of the prefills, the device those of the decodes before them."""
        first, chunks, rows, stride = layout.num_decodes, layout.prefill_tokens, layout.token_rows, self._row_stride
        ends, is_sampled = seq_lens[first:], layout.samples[first:]
        positions = ((ends - chunks).repeat(chunks) + layout.offsets).astype(np.int64)
        slots = slots_for(self._block_table.host, rows, positions, self._block_size)
        sampled_places = layout.prefill_rows[is_sampled] * np.int64(stride) + ends[is_sampled]
        num_tokens = first + len(rows)
        num_slots = padded_room(num_tokens, self._num_groups)
        behind = [_behind(first, values, num_tokens) for values in (rows * stride + positions, positions)]
        uploaded = upload_all((*behind, _behind(first, slots, num_slots), ends, sampled_places), self._device)
        places, on_device, slot_mapping, lengths, sampled = uploaded
        slot_mapping = slot_mapping[:, :num_tokens]
        input_ids = self._flat_token_ids.index_select(0, places)
        turns = None if self._rope_deltas is None else on_device.clone()
        whole = self.decodes.inputs(len(layout.rows))
        whole.seq_lens[first:].copy_(lengths)
        torch.index_select(self._block_table.device, 1, layout.prefill_index, out=whole.block_table[:, first:])
        if first:
            self.decodes.prepare_elsewhere(
                plan,
                input_ids=input_ids[:first],
                positions=on_device[:first],
                slot_mapping=slot_mapping[:, :first],
                rope_positions=None if turns is None else turns[:first],
            )
        tables = (table for _, table in self.decodes.groups(len(layout.rows)))
        return StepInputs(
            layout=layout,
            input_ids=input_ids,
            positions=on_device,
            rope_positions=turns,
            attention=tuple(
                AttentionMetadata(
                    num_decodes=first,
                    slot_mapping=own_slots,
                    block_table=block_table,
                    seq_lens=whole.seq_lens,
                    query_start=layout.query_start,
                    host_query_lens=layout.query_lens,
                    host_seq_lens=seq_lens,
                    is_padded=False,
                    decode_rows=self.decodes.inputs(first).rows,
                    draft_runs=self.decodes.draft_runs(first),
                    prefill_rows=layout.prefill_rows,
                )
                for own_slots, block_table in zip(slot_mapping.unbind(), tables, strict=True)
            ),
            sampled_positions=seq_lens[layout.samples],
            prefill_places=sampled if len(sampled) else None,
            places=places,
        )

    def following_tokens(self, row: int, first: int, count: int) -> torch.Tensor:
        """Token ids (count,) int32 of ``row`` from position ``first`` on."""
        return self._token_ids[row, first : first + count]

    def advance(self, inputs: StepInputs, sampled: torch.Tensor | None) -> None:
        """Count the step's tokens as computed; ``sampled`` (n,) int32 become their rows' next known tokens."""
        layout, num_decodes = inputs.layout, inputs.layout.num_decodes
        if num_decodes:
            assert sampled is not None
            self.decodes.advance(num_decodes, sampled if layout.is_decode_only else sampled[:num_decodes])
            self.count_computed(layout.rows[:num_decodes])
        if layout.is_decode_only:
            return
        self.num_computed[layout.prefill_rows] += layout.prefill_tokens
        self._computed.push(layout.prefill_rows)
        if inputs.prefill_places is not None:
            assert sampled is not None
            self._flat_token_ids.index_copy_(0, inputs.prefill_places, sampled[num_decodes:])

    def count_computed(self, rows: IntArray, tokens: IntArray | int = 1) -> None:
        """Count on the host the ``tokens`` (n,) of ``rows`` (n,) that the device has counted."""
        if not self._computed.is_shared:
            self.num_computed[rows] += tokens

    def _layout_of(self, plan: StepPlan) -> BatchLayout:
        """The layout of ``plan``, kept while the same rows decode and nothing else happens."""
        if len(plan.prefill_rows):
            return make_layout(plan, self._device)
        last = self._last_decodes
        if last is None or not np.array_equal(last.rows, plan.decode_rows):
            self._last_decodes = last = make_layout(plan, self._device)
        return last


def _behind(room: int, values: SlotArray, width: int) -> SlotArray:
    """``values`` (..., n) after ``room`` columns of zeros, filled with zeros to ``width`` columns."""
    count = values.shape[-1]
    if count == width:
        return values
    whole = np.zeros((*values.shape[:-1], width), dtype=np.int64)
    whole[..., room : room + count] = values
    return whole
