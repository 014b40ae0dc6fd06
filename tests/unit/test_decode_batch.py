"""Inputs of decode steps made by the device: the persistent batch with and without, over the same plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tp_engine.plan import Admission, IntArray, RowSampling, StepPlan
from tp_engine.worker.input_batch import InputBatch, StepInputs

CPU = torch.device("cpu")
NUM_ROWS, MAX_LEN, BLOCK_SIZE = 6, 60, 4


class Plans:
    """Random plans that follow one another: rows come, are computed in chunks, decode and go."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._blocks = iter(self._rng.permutation(10_000).astype(np.int32))
        self._prompt_left: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._step_id = 0

    def following(self) -> StepPlan:
        """Half of the steps only decode, if there is anything to decode."""
        self._step_id += 1
        decoding = [row for row, left in self._prompt_left.items() if left == 0 and self._length[row] < MAX_LEN - 1]
        if decoding and self._rng.random() < 0.5:
            return self._plan([], (), self._rng.permutation(decoding), {})
        released = [row for row in self._prompt_left if self._rng.random() < 0.2]
        for row in released:
            del self._prompt_left[row], self._length[row]
        admitted = tuple(self._admit(row) for row in range(NUM_ROWS) if self._enters(row))
        chunks = {row: int(self._rng.integers(1, left + 1)) for row, left in self._prompt_left.items() if left}
        return self._plan(released, admitted, [row for row in decoding if row in self._prompt_left], chunks)

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
        return np.array([next(self._blocks) for _ in range(count)], dtype=np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_device_and_host_make_the_same_inputs(seed: int) -> None:
    """Oracle: the batch whose inputs are made on the host, over 60 random plans."""
    plans, rng = Plans(seed), np.random.default_rng(seed)
    batches = [
        InputBatch(
            max_num_seqs=NUM_ROWS,
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            device=CPU,
            decodes_on_device=on_device,
        )
        for on_device in (False, True)
    ]
    num_made_by_device = 0
    for _ in range(60):
        plan = plans.following()
        for batch in batches:
            batch.apply(plan)
        if plan.num_tokens == 0:
            continue
        on_host, on_device = (batch.prepare(plan) for batch in batches)
        num_made_by_device += on_device.sampled_places is None
        compare(on_host, on_device)
        sampled = torch.from_numpy(rng.integers(0, 1000, len(plan.sampled_rows)).astype(np.int32))
        for batch, inputs in zip(batches, (on_host, on_device), strict=True):
            batch.advance(inputs, sampled if len(sampled) else None)
        np.testing.assert_array_equal(batches[0].num_computed, batches[1].num_computed)
    assert num_made_by_device > 10


def compare(on_host: StepInputs, on_device: StepInputs) -> None:
    """Everything that the model and the sampler see; of a block table, the columns in use."""
    expected, found = on_host.attention, on_device.attention
    for name in ("input_ids", "positions", "sampled_positions"):
        np.testing.assert_array_equal(getattr(on_host, name), getattr(on_device, name), err_msg=name)
    for name in ("num_decodes", "slot_mapping", "seq_lens", "query_start", "host_query_lens", "host_seq_lens"):
        np.testing.assert_array_equal(getattr(expected, name), getattr(found, name), err_msg=name)
    assert not found.is_padded and on_host.input_ids.dtype == on_device.input_ids.dtype
    for request, length in enumerate(expected.host_seq_lens.tolist()):
        used = -(-length // BLOCK_SIZE)
        assert torch.equal(expected.block_table[request, :used], found.block_table[request, :used])


def test_padded_step() -> None:
    """Oracle: a step of the rows alone; padding has no length and no slot, and is advanced nowhere."""
    batch = InputBatch(
        max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, device=CPU, decodes_on_device=True
    )
    plans = Plans(1)
    for _ in range(3):
        plan = plans.following()
        batch.apply(plan)
        if plan.num_tokens:
            inputs = batch.prepare(plan)
            batch.advance(inputs, torch.zeros(len(plan.sampled_rows), dtype=torch.int32))
    before = batch.num_computed.copy()
    assert batch.decodes is not None
    batch.decodes.set_rows(np.array([3, 0], dtype=np.int32), 4)
    inputs = batch.decodes.prepare(4)
    metadata = batch.decodes.metadata(inputs, np.append(before[[3, 0]] + 1, [0, 0]).astype(np.int32))
    assert inputs.seq_lens.tolist() == metadata.host_seq_lens.tolist() and metadata.is_padded
    assert inputs.slot_mapping.tolist()[2:] == [-1, -1]
    batch.decodes.advance(4, torch.tensor([7, 8, 9, 9], dtype=torch.int32))
    before[[3, 0]] += 1
    np.testing.assert_array_equal(batch.num_computed, before)
    assert [int(batch.following_tokens(row, int(before[row]), 1)) for row in (3, 0)] == [7, 8]
