"""Inputs of steps, made by the device for decodes and by the host for prefills, over consecutive plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.ops import Kind, implementation, kind_of
from tp_engine.kernels.steps.draft_inputs import DraftInputs
from tp_engine.plan import Admission, IntArray, RowSampling, StepPlan
from tp_engine.worker.batch import decode_batch, input_batch
from tp_engine.worker.batch.decode_batch import DecodeBatch
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.spare_rows import MirroredTable, SpareRows
from tp_engine.worker.batch.step_inputs import StepInputs

CPU = torch.device("cpu")
NUM_ROWS, MAX_LEN, BLOCK_SIZE = 6, 60, 4


class TwoMemories(MirroredTable):
    """A table whose device has memory of its own, as on a GPU."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__(shape, device)
        self.device, self.is_shared = self.device.clone(), False


class Plans:
    """Random consecutive plans: rows enter, are computed in chunks, decode and leave."""

    def __init__(self, seed: int, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._rng = np.random.default_rng(seed)
        self._blocks = iter(self._rng.permutation(10_000).astype(np.int32))
        self._prompt_left: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._step_id = 0

    def following(self) -> StepPlan:
        """The next plan; half of the steps only decode, if a row can decode."""
        self._step_id += 1
        decoding = [row for row, left in self._prompt_left.items() if left == 0 and self._length[row] < MAX_LEN - 1]
        if decoding and self._rng.random() < 0.5:
            return self._plan([], (), self._rng.permutation(decoding), {})
        released = [row for row in self._prompt_left if self._rng.random() < 0.2]
        for row in released:
            del self._prompt_left[row], self._length[row]
        admitted = tuple(self._admit(row) for row in range(NUM_ROWS) if self._enters(row))
        chunks = {row: int(self._rng.integers(1, left + 1)) for row, left in self._prompt_left.items() if left}
        return self._plan(released, admitted, [row for row in decoding if row not in released], chunks)

    def _enters(self, row: int) -> bool:
        return row not in self._prompt_left and self._rng.random() < 0.5

    def _admit(self, row: int) -> Admission:
        length = int(self._rng.integers(1, 20))
        self._prompt_left[row], self._length[row] = length, 0
        return Admission(
            row=row,
            token_ids=self._rng.integers(0, 1000, length).astype(np.int32),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=self._take(-(-length // BLOCK_SIZE)),
            sampling=RowSampling(),
        )

    def _plan(
        self, released: list[int], admitted: tuple[Admission, ...], decodes: object, chunks: dict[int, int]
    ) -> StepPlan:
        decode_rows = np.array(decodes, dtype=np.int32).reshape(-1)
        growing = [row for row in decode_rows.tolist() if self._length[row] % BLOCK_SIZE == 0]
        for row in decode_rows.tolist():
            self._length[row] += 1
        for row, count in chunks.items():
            self._length[row] += count
            self._prompt_left[row] -= count
        return StepPlan(
            step_id=self._step_id,
            released=np.array(released, dtype=np.int32),
            admitted=admitted,
            block_rows=np.array(growing, dtype=np.int32),
            block_ids=self._take(len(growing)),
            decode_rows=decode_rows,
            prefill_rows=np.array(list(chunks), dtype=np.int32),
            prefill_tokens=np.array(list(chunks.values()), dtype=np.int32),
            prefill_samples=np.array([self._prompt_left[row] == 0 for row in chunks], dtype=np.bool_),
        )

    def _take(self, count: int) -> IntArray:
        """``count`` blocks of each group."""
        return np.array([next(self._blocks) for _ in range(count * self._num_groups)], dtype=np.int32)


class Rows:
    """The oracle: every row as lists, the inputs of a step token by token."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[list[int]]] = {}
        self.computed: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            self.tokens[admission.row] = admission.token_ids.tolist()
            self.blocks[admission.row] = self.by_group(admission.block_ids)
            self.computed[admission.row] = admission.num_computed_tokens
        for row, blocks in zip(plan.block_rows.tolist(), self.by_group(plan.block_ids), strict=True):
            self.blocks[row].append(blocks)

    def by_group(self, block_ids: IntArray) -> list[list[int]]:
        ids = block_ids.tolist()
        return [ids[i : i + self.num_groups] for i in range(0, len(ids), self.num_groups)]

    def check(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Everything that the model and the sampler see; of a block table, the columns in use."""
        chunks = [(row, 1) for row in plan.decode_rows.tolist()]
        chunks += zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), strict=True)
        places = [(row, self.computed[row] + i) for row, count in chunks for i in range(count)]
        ends = [self.computed[row] + count for row, count in chunks]
        counts = [count for _, count in chunks]
        assert inputs.input_ids.tolist() == [self.tokens[row][position] for row, position in places]
        assert inputs.positions.tolist() == [position for _, position in places]
        end_of = dict(zip([row for row, _ in chunks], ends, strict=True))
        assert inputs.sampled_positions.tolist() == [end_of[row] for row in plan.sampled_rows.tolist()]
        assert (inputs.input_ids.dtype, inputs.positions.dtype) == (torch.int32, torch.int64)
        assert len(inputs.attention) == self.num_groups
        for group in range(self.num_groups):
            self.check_group(group, plan, inputs.attention[group], places, ends)
            assert inputs.attention[group].host_query_lens.tolist() == counts

    def check_group(
        self, group: int, plan: StepPlan, attention: AttentionMetadata, places: list[tuple[int, int]], ends: list[int]
    ) -> None:
        rows = [*plan.decode_rows.tolist(), *plan.prefill_rows.tolist()]
        assert attention.slot_mapping.tolist() == [self.slot(group, *place) for place in places]
        assert attention.seq_lens.tolist() == attention.host_seq_lens.tolist() == ends
        assert attention.query_start.tolist() == [0, *np.cumsum(attention.host_query_lens).tolist()]
        assert attention.num_decodes == len(plan.decode_rows) and not attention.is_padded
        for request, row in enumerate(rows):
            used = [blocks[group] for blocks in self.blocks[row][: -(-ends[request] // BLOCK_SIZE)]]
            assert attention.block_table[request, : len(used)].tolist() == used
        assert (attention.slot_mapping.dtype, attention.seq_lens.dtype) == (torch.int64, torch.int32)
        assert attention.slot_mapping.is_contiguous() and attention.block_table.is_contiguous()

    def slot(self, group: int, row: int, position: int) -> int:
        return self.blocks[row][position // BLOCK_SIZE][group] * BLOCK_SIZE + position % BLOCK_SIZE

    def advance(self, plan: StepPlan, sampled: list[int]) -> None:
        for row in plan.decode_rows.tolist():
            self.computed[row] += 1
        for row, count in zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), strict=True):
            self.computed[row] += count
        for row, token in zip(plan.sampled_rows.tolist(), sampled, strict=True):
            self.tokens[row].append(token)


def make_batch(num_groups: int = 1) -> InputBatch:
    return InputBatch(
        max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, num_groups=num_groups, device=CPU
    )


@pytest.mark.parametrize("kind", ["twin", kind_of("prepare_decodes", "cpu")])
@pytest.mark.parametrize("table", [MirroredTable, TwoMemories])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_inputs_of_steps(table: type, kind: Kind, num_groups: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: lists of tokens and blocks, over 60 random plans; host and device with separate memory, and with one."""
    monkeypatch.setattr(input_batch, "MirroredTable", table)
    monkeypatch.setattr(decode_batch, "op", lambda name, device_type: implementation(name, kind))
    plans, rng = Plans(seed, num_groups), np.random.default_rng(seed)
    rows, batch = Rows(num_groups), make_batch(num_groups)
    num_mixed = num_decoding = 0
    for _ in range(60):
        plan = plans.following()
        rows.apply(plan)
        batch.apply(plan)
        if plan.num_tokens == 0:
            continue
        num_mixed += bool(len(plan.decode_rows) and len(plan.prefill_rows))
        num_decoding += not len(plan.prefill_rows)
        inputs = batch.prepare(plan)
        rows.check(plan, inputs)
        sampled = rng.integers(0, 1000, len(plan.sampled_rows)).astype(np.int32)
        batch.advance(inputs, torch.from_numpy(sampled) if len(sampled) else None)
        rows.advance(plan, sampled.tolist())
        assert [int(batch.num_computed[row]) for row in rows.computed] == list(rows.computed.values())
    assert num_mixed > 5 and num_decoding > 10


def test_spare_rows_have_whole_tables() -> None:
    """Oracle: the table of the row that each stands for, on the host and on a device with memory of its own."""
    table, computed = TwoMemories((2, NUM_ROWS, 5), CPU), TwoMemories((NUM_ROWS,), CPU)
    table.host[:] = np.arange(table.host.size).reshape(table.host.shape)
    table.device.copy_(torch.from_numpy(table.host))
    spare, rows = np.array([4, 5], dtype=np.int32), np.array([1, 1], dtype=np.int32)
    own = table.host[:, spare, 4].copy()
    spare_rows = SpareRows(torch.zeros(NUM_ROWS, MAX_LEN, dtype=torch.int32), table, computed)
    spare_rows.fill(spare, rows, np.array([7, 8], dtype=np.int32), num_blocks=4)
    assert np.array_equal(table.host[:, spare, :4], table.host[:, rows, :4])
    assert np.array_equal(table.host[:, spare, 4], own), "more than the row's blocks"
    assert torch.equal(table.device, torch.from_numpy(table.host)) and computed.device[spare].tolist() == [1, 2]


def test_the_device_says_where_decodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the device's counter, set back without the host's knowledge, also in a step with a prefill; the prefill's
    counter is not read."""
    monkeypatch.setattr(input_batch, "MirroredTable", TwoMemories)
    batch, rows = make_batch(), np.arange(3, dtype=np.int32)
    admitted = tuple(
        Admission(
            row=row,
            token_ids=np.arange(10 * row, 10 * row + 9, dtype=np.int32),
            num_prompt_tokens=9,
            num_computed_tokens=8 if row < 2 else 0,
            block_ids=np.arange(3 * row, 3 * row + 3, dtype=np.int32),
            sampling=RowSampling(),
        )
        for row in range(3)
    )
    chunk: dict[str, Any] = {"prefill_tokens": np.array([9], dtype=np.int32), "prefill_samples": np.array([True])}
    plan = StepPlan(step_id=1, admitted=admitted, decode_rows=rows[:2], prefill_rows=rows[2:], **chunk)
    batch.apply(plan)
    counter = batch.row_tables().num_computed
    counter[1], counter[2] = 5, 7
    inputs = batch.prepare(plan)
    assert inputs.positions.tolist() == [8, 5, *range(9)]
    assert inputs.input_ids.tolist() == [8, 15, *range(20, 29)]
    assert inputs.attention[0].slot_mapping.tolist() == [2 * 4, 4 * 4 + 1, *range(6 * 4, 6 * 4 + 9)]
    assert inputs.attention[0].seq_lens.tolist() == [9, 6, 9]
    batch.advance(inputs, torch.tensor([100, 101, 102], dtype=torch.int32))
    assert counter.tolist()[:3] == [9, 6, 9]
    assert [int(batch.following_tokens(row, place, 1)) for row, place in ((0, 9), (1, 6), (2, 9))] == [100, 101, 102]


def test_padded_step() -> None:
    """Oracle: a step of these rows alone; padding has no length and no slot, and advances no row."""
    batch = make_batch()
    plans = Plans(1)
    for _ in range(3):
        plan = plans.following()
        batch.apply(plan)
        if plan.num_tokens:
            inputs = batch.prepare(plan)
            batch.advance(inputs, torch.zeros(len(plan.sampled_rows), dtype=torch.int32))
    before = batch.num_computed.copy()
    batch.decodes.set_rows(StepPlan(step_id=9, decode_rows=np.array([3, 0], dtype=np.int32)), 4)
    padded = batch.decodes.prepare(4)
    (metadata,) = batch.decodes.metadata(padded, np.append(before[[3, 0]] + 1, [0, 0]).astype(np.int32))
    assert padded.seq_lens.tolist() == metadata.host_seq_lens.tolist() and metadata.is_padded
    assert metadata.slot_mapping.tolist()[2:] == [-1, -1]
    batch.decodes.advance(4, torch.tensor([7, 8, 9, 9], dtype=torch.int32))
    before[[3, 0]] += 1
    np.testing.assert_array_equal(batch.num_computed, before)
    assert [int(batch.following_tokens(row, int(before[row]), 1)) for row in (3, 0)] == [7, 8]


def test_rows_of_an_epoch_are_set_once() -> None:
    """Oracle: rows of the known epoch are not read again; rows of another epoch, another size or no epoch are."""
    decodes = make_batch().decodes

    def after(rows: list[int], size: int, epoch: int) -> list[int]:
        plan = StepPlan(step_id=1, rows_epoch=epoch, decode_rows=np.array(rows, dtype=np.int32))
        decodes.set_rows(plan, size)
        found: list[int] = decodes.inputs(size).rows.tolist()
        return found

    assert after([3, 0], 2, 5) == after([1, 2], 2, 5) == [3, 0]
    assert after([1, 2], 2, 6) == [1, 2]
    assert after([2, 1], 2, 0) == [2, 1] and after([1, 2], 2, 0) == [1, 2]
    assert after([3, 0], 3, 6)[:2] == [3, 0]


def test_draft_rows_go_on_behind_their_row() -> None:
    """By hand, 8 rows: three draft rows of row 4, one of row 2; others; none while steps are
    recorded, whatever the step before had."""
    decodes = DecodeBatch(make_batch().row_tables(), 8, first_spare=8)

    def after(rows: list[int], bases: list[int], size: int) -> list[list[int]]:
        own, draft = np.array(rows, dtype=np.int32), np.array(bases, dtype=np.int32)
        decodes.base_rows = draft if bases else decodes.base_rows
        decodes.set_rows(StepPlan(step_id=1, decode_rows=own), size)
        runs = decodes.draft_runs(size)
        assert runs is not None
        found: list[list[int]] = runs.tolist()
        return found

    none = [0, -1]
    assert after([4, 0, 2, 8, 9, 10, 11], [4, 4, 4, 2], 8) == [[3, 3], [0, 0], [6, 1], *[none] * 4, [0, 0]]
    assert after([4, 0, 2, 8, 9, 10, 11], [2, 4, 4, 4], 8) == [[4, 3], [0, 0], [3, 1], *[none] * 4, [0, 0]]
    assert after([], [], 4) == after([4, 0, 2, 7], [], 4) == [[0, 0]] * 4
    assert make_batch().decodes.draft_runs(2) is None


@pytest.mark.parametrize("kind", ["twin", kind_of("advance_drafts", "cpu")])
def test_the_next_inputs_of_drafts(kind: Kind) -> None:
    """By hand, blocks of 4 tokens: within a block, in the next one, at the end of the slots and behind it, padding."""
    inputs = DraftInputs(
        positions=torch.tensor([5, 7, 10, 11, 3]),
        limits=torch.tensor([12, 12, 12, 12, 0]),
        block_table=torch.tensor([[9, 2, 6, 0]] * 5, dtype=torch.int32),
        slot_mapping=torch.zeros(5, dtype=torch.int64),
        seq_lens=torch.zeros(5, dtype=torch.int32),
        rope_deltas=torch.tensor([0, -3, -3, 0, -9], dtype=torch.int32),
        rope_positions=torch.zeros(5, dtype=torch.int64),
    )
    implementation("advance_drafts", kind)(inputs, BLOCK_SIZE)
    assert inputs.rotary_positions.tolist() == [6, 5, 8, 11, 0]
    assert inputs.positions.tolist() == [6, 8, 11, 11, 0]
    assert inputs.slot_mapping.tolist() == [10, 24, 27, -1, -1]
    assert inputs.seq_lens.tolist() == [7, 9, 12, 12, 0]
