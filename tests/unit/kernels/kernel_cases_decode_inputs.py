"""Inputs of decode steps by Triton: interpreted and on CUDA (``CASES``), and the engine's launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tp_engine.kernels.ops import Kind, has_triton, implementation
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables
from tp_engine.worker.batch.step_inputs import slots_for


def make_tables(num_rows: int, max_len: int, block_size: int, num_groups: int, device: str, seed: int = 0) -> RowTables:
    """Rows of random lengths; each block belongs to one row and one group.  With several groups heads turn by less than
    a token's position."""
    rng = np.random.default_rng(seed)
    num_columns = -(-max_len // block_size)
    table = rng.permutation(num_groups * num_rows * num_columns).reshape(num_groups, num_rows, num_columns)
    lengths = rng.integers(0, max_len, num_rows)
    lengths[:2] = (0, max_len - 1)
    tokens = rng.integers(0, 1000, (num_rows, max_len + 1))
    token_ids, num_computed, block_table = (
        torch.from_numpy(array.astype(np.int32)).to(device) for array in (tokens, lengths, table)
    )
    deltas = torch.from_numpy(-rng.integers(0, 40, num_rows).astype(np.int32)).to(device) if num_groups > 1 else None
    return RowTables(
        token_ids=token_ids,
        num_computed=num_computed,
        block_table=block_table,
        block_size=block_size,
        rope_deltas=deltas,
    )


def deltas_of(tables: RowTables) -> np.ndarray:
    """By how much the rows turn more than their positions."""
    found = tables.rope_deltas
    return np.zeros(len(tables.num_computed), dtype=np.int64) if found is None else found.cpu().numpy()


def operations(kind: Kind) -> tuple[Callable[..., None], Callable[..., None]]:
    """The start and the end of a decode step, by one implementation."""
    return implementation("prepare_decodes", kind), implementation("advance_decodes", kind)


def check(device: str, kind: Kind, rows: list[int], max_len: int, block_size: int, num_groups: int) -> None:
    """Three steps of ``rows``. Oracle: the host's own arithmetic (``slots_for``) on copies of the tables."""
    prepare, advance = operations(kind)
    tables = make_tables(9, max_len, block_size, num_groups, device)
    token_ids, lengths, block_table = (
        tensor.cpu().numpy().copy() for tensor in (tables.token_ids, tables.num_computed, tables.block_table)
    )
    inputs = DecodeInputs.allocate(len(rows) + 2, tables).first(len(rows))
    inputs.rows.copy_(torch.tensor(rows, dtype=torch.int32))
    kept = [(request, row) for request, row in enumerate(rows) if row >= 0 and lengths[row] + 3 <= max_len]
    inputs.rows[[request for request in range(len(rows)) if request not in dict(kept)]] = -1
    for step in range(3):
        prepare(tables, inputs)
        compare(inputs, kept, token_ids, lengths, block_table, block_size)
        turns = np.zeros(len(rows), dtype=np.int64)
        for request, row in kept:
            turns[request] = lengths[row] + deltas_of(tables)[row]
        np.testing.assert_array_equal(inputs.rotary_positions.cpu(), turns)
        sampled = np.arange(len(rows), dtype=np.int32) + 2000 + step
        advance(tables, inputs, torch.from_numpy(sampled).to(device))
        for request, row in kept:
            lengths[row] += 1
            token_ids[row, lengths[row]] = sampled[request]
        np.testing.assert_array_equal(tables.token_ids.cpu(), token_ids)
        np.testing.assert_array_equal(tables.num_computed.cpu(), lengths)
        np.testing.assert_array_equal(tables.block_table.cpu(), block_table)


def compare(
    inputs: DecodeInputs,
    kept: list[tuple[int, int]],
    token_ids: np.ndarray,
    lengths: np.ndarray,
    block_table: np.ndarray,
    block_size: int,
) -> None:
    """The inputs equal the host's; all other entries are padding."""
    expected = {name: np.zeros(len(inputs.rows)) for name in ("input_ids", "positions", "seq_lens")}
    expected["slot_mapping"] = np.full((len(block_table), len(inputs.rows)), -1)
    for request, row in kept:
        length = lengths[row]
        expected["input_ids"][request] = token_ids[row, length]
        expected["positions"][request] = length
        for group, table in enumerate(block_table):
            slot = slots_for(table, np.array([row]), np.array([length]), block_size)
            expected["slot_mapping"][group, request] = slot[0]
        expected["seq_lens"][request] = length + 1
        num_used = -(-(length + 1) // block_size)
        np.testing.assert_array_equal(inputs.block_table[:, request, :num_used].cpu(), block_table[:, row, :num_used])
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(inputs, name).cpu(), values, err_msg=name)


def make_cases(kind: Kind) -> dict[str, Callable[[str], None]]:
    """Name -> check on a device; 5000 tokens in blocks of 16 have more columns than one turn of the kernel copies."""
    cases: dict[str, Callable[[str], None]] = {}
    for max_len, block_size, num_groups in ((37, 16, 1), (37, 16, 3), (60, 1, 1), (5000, 16, 2), (600, 256, 1)):
        for rows in ([3], [4, -1, 2, 8, -1], list(range(9)), [-1, -1]):
            cases[f"{max_len}-{block_size}-{num_groups}-{rows}"] = partial(
                check, kind=kind, rows=rows, max_len=max_len, block_size=block_size, num_groups=num_groups
            )
    return cases


TWIN_CASES = make_cases("twin")
CASES = make_cases("triton") if has_triton() else {}


def launch_all() -> None:
    """A short and a long context, in blocks of 16; one group and several."""
    for max_len, num_groups in ((4096, 1), (40960, 1), (4096, 3)):
        empty = partial(torch.empty, dtype=torch.int32, device="meta")
        tables = RowTables(
            token_ids=empty(256, max_len + 1),
            num_computed=empty(256),
            block_table=empty(num_groups, 256, max_len // 16),
            block_size=16,
        )
        inputs = DecodeInputs.allocate(256, tables)
        prepare, advance = operations("triton")
        prepare(tables, inputs)
        advance(tables, inputs, empty(256))
