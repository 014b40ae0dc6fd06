"""Inputs of padded steps with prompts by Triton: interpreted and on CUDA (``CASES``), and the engine's
launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tests.unit.kernels.kernel_cases_decode_inputs import deltas_of, make_tables
from tp_engine.kernels.ops import Kind, has_triton, implementation
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.kernels.steps.padded_steps import PaddedInputs, PaddedRequests
from tp_engine.plan import StepPlan
from tp_engine.worker.batch.padded_batch import MAX_CHUNKS, PaddedBatch, StepSize, StepSizes
from tp_engine.worker.batch.step_inputs import slots_for

Chunk = tuple[int, int, bool]
"""A chunk's row, its number of tokens, and whether it is sampled."""


def make_plan(decodes: list[int], chunks: list[Chunk]) -> StepPlan:
    """A step of these rows."""
    rows, tokens, samples = zip(*chunks, strict=True) if chunks else ((), (), ())
    return StepPlan(
        step_id=1,
        decode_rows=np.array(decodes, dtype=np.int32),
        prefill_rows=np.array(rows, dtype=np.int32),
        prefill_tokens=np.array(tokens, dtype=np.int32),
        prefill_samples=np.array(samples, dtype=np.bool_),
    )


def check(
    device: str,
    kind: Kind,
    size: tuple[int, int],
    decodes: list[int],
    chunks: list[Chunk],
    block_size: int = 16,
    num_groups: int = 1,
    max_len: int = 600,
) -> None:
    """One step. Oracle: the host's own arithmetic, token by token, on copies of the tables; nothing else changes."""
    tables = make_tables(9, max_len, block_size, num_groups, device)
    lengths = np.array([0, max_len - 1, 5, 16, 31, 32, 100, 0, 17], dtype=np.int32)
    tables.num_computed.copy_(torch.from_numpy(lengths))
    token_ids, block_table = (tensor.cpu().numpy().copy() for tensor in (tables.token_ids, tables.block_table))
    step_size = StepSize(decodes=size[0], tokens=size[1])
    batch = PaddedBatch(tables, StepSizes(decodes=(8,), tokens=(200,)))
    plan = make_plan(decodes, chunks)
    batch.set_step(plan, step_size)
    requests, inputs = batch.requests(step_size.decodes), batch.inputs(step_size)
    implementation("prepare_steps", kind)(tables, requests, inputs)
    compare(inputs, requests, plan, lengths, token_ids, block_table, block_size)
    turns = inputs.positions.cpu().numpy().copy()
    turns[: len(decodes)] += deltas_of(tables)[decodes]
    np.testing.assert_array_equal(inputs.rotary_positions.cpu(), turns)
    sampled = np.arange(step_size.num_requests, dtype=np.int32) + 2000
    implementation("advance_steps", kind)(tables, requests, torch.from_numpy(sampled).to(device))
    expected = iter(sampled.tolist())
    for row, count, is_sampled in [*((row, 1, True) for row in decodes), *chunks]:
        lengths[row] += count
        if is_sampled:
            token_ids[row, lengths[row]] = next(expected)
    np.testing.assert_array_equal(tables.token_ids.cpu(), token_ids)
    np.testing.assert_array_equal(tables.num_computed.cpu(), lengths)
    np.testing.assert_array_equal(tables.block_table.cpu(), block_table)


def compare(
    inputs: PaddedInputs,
    requests: PaddedRequests,
    plan: StepPlan,
    lengths: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    block_table: npt.NDArray[np.int32],
    block_size: int,
) -> None:
    """The inputs equal the host's; all other entries are padding."""
    num_tokens, num_requests = len(inputs.input_ids), len(inputs.seq_lens)
    num_decodes = num_requests - MAX_CHUNKS
    expected = {name: np.zeros(num_tokens) for name in ("input_ids", "positions")}
    expected["seq_lens"], expected["slot_mapping"] = np.zeros(num_requests), np.full((len(block_table), num_tokens), -1)
    starts, wanted, sampled_rows = [*range(num_decodes + 1)], [], []
    token = 0
    for request, (row, count, is_sampled) in enumerate(requests_of(plan), start=0):
        place = request if request < len(plan.decode_rows) else num_decodes + request - len(plan.decode_rows)
        token = place if place < num_decodes else max(token, num_decodes)
        positions = np.arange(lengths[row], lengths[row] + count)
        part = slice(token, token + count)
        expected["input_ids"][part], expected["positions"][part] = token_ids[row, positions], positions
        for group, table in enumerate(block_table):
            rows = np.full(count, row)
            expected["slot_mapping"][group, part] = slots_for(table, rows, positions, block_size)
            num_used = -(-int(lengths[row] + count) // block_size)
            own = inputs.block_table[group, place, :num_used]
            np.testing.assert_array_equal(own.cpu(), table[row, :num_used])
        expected["seq_lens"][place] = lengths[row] + count
        token += count
        if place >= num_decodes:
            starts.append(token)
        if is_sampled:
            wanted.append(token - 1)
            sampled_rows.append(row)
    starts += [starts[-1]] * (num_requests + 1 - len(starts))
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(inputs, name).cpu(), values, err_msg=name)
    rest = num_requests - len(wanted)
    assert requests.query_start.tolist() == starts
    assert requests.wanted.tolist() == wanted + [0] * rest
    assert requests.sampled_rows.tolist() == sampled_rows + [-1] * rest


def requests_of(plan: StepPlan) -> list[Chunk]:
    """The rows of a step, in batch order."""
    chunks = zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), plan.prefill_samples.tolist(), strict=True)
    return [*((row, 1, True) for row in plan.decode_rows.tolist()), *chunks]


def make_cases(kind: Kind) -> dict[str, Callable[[str], None]]:
    """Name -> check on a device; the second room has more tokens than one program takes, and not a multiple of it."""
    steps: dict[str, tuple[tuple[int, int], list[int], list[Chunk]]] = {
        "empty": ((8, 16), [], []),
        "full": ((3, 16), [8, 1, 5], [(0, 11, False), (2, 5, True)]),
        "one_prompt": ((0, 150), [], [(0, 130, True)]),
        "mixed": ((8, 150), [3, 8, 4], [(0, 70, False), (2, 1, True), (6, 20, False), (7, 9, True)]),
        "no_chunk_is_sampled": ((8, 150), [3], [(0, 64, False)]),
        "decodes_alone": ((8, 16), [2, 3], []),
    }
    cases: dict[str, Callable[[str], None]] = {}
    for name, (size, decodes, chunks) in steps.items():
        for block_size, num_groups in ((16, 1), (16, 3), (1, 1), (256, 1)):
            cases[f"{name}-{block_size}-{num_groups}"] = partial(
                check,
                kind=kind,
                size=size,
                decodes=decodes,
                chunks=chunks,
                block_size=block_size,
                num_groups=num_groups,
            )
    # More columns of a block table than one turn of the kernel copies.
    cases["long"] = partial(
        check, kind=kind, size=(8, 16), decodes=[1, 2], chunks=[(3, 9, True)], max_len=5000, num_groups=2
    )
    return cases


TWIN_CASES = make_cases("twin")
CASES = make_cases("triton") if has_triton() else {}


def launch_all() -> None:
    """Small and large steps; a short and a long context; one group and several."""
    for max_len, num_groups in ((4096, 1), (40960, 1), (4096, 3)):
        empty = partial(torch.empty, dtype=torch.int32, device="meta")
        tables = RowTables(
            token_ids=empty(256, max_len + 1),
            num_computed=empty(256),
            block_table=empty(num_groups, 256, max_len // 16),
            block_size=16,
        )
        batch = PaddedBatch(tables, StepSizes(decodes=(256,), tokens=(1024,)))
        for size in (
            StepSize(decodes=0, tokens=32),
            StepSize(decodes=8, tokens=64),
            StepSize(decodes=256, tokens=1024),
        ):
            requests = batch.requests(size.decodes)
            implementation("prepare_steps", "triton")(tables, requests, batch.inputs(size))
            implementation("advance_steps", "triton")(tables, requests, empty(size.num_requests))
