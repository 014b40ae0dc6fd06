"""Slots of tokens in the paged cache (rows B2 and B3)."""

from __future__ import annotations

import numpy as np
import pytest

from tp_engine.plan import PAD_SLOT
from tp_engine.worker.batch.step_inputs import SlotArray, slots_for


def of_one_row(table: np.ndarray, positions: np.ndarray, block_size: int) -> SlotArray:
    return slots_for(table[np.newaxis], np.zeros_like(positions), positions, block_size)


def test_golden_two_blocks_of_256() -> None:
    """Oracle: the documented example, block_size 256, table [5, 12], 300 tokens."""
    slots = of_one_row(np.array([5, 12], dtype=np.int32), np.arange(300), 256)
    assert slots.tolist() == [*range(1280, 1536), *range(3072, 3116)]


def test_many_rows_from_any_position() -> None:
    """Oracle: the definition, block_id * block_size + offset, token by token."""
    rng = np.random.default_rng(0)
    tables = rng.permutation(1000)[:60].reshape(6, 10).astype(np.int32)
    rows, positions = rng.integers(0, 6, 200), rng.integers(0, 160, 200).astype(np.int32)
    expected = [int(tables[r, p // 16]) * 16 + int(p) % 16 for r, p in zip(rows, positions, strict=True)]
    assert slots_for(tables, rows, positions, 16).tolist() == expected


def test_padding_and_nothing() -> None:
    """Oracle: a negative position is padding; no tokens have no slots."""
    table = np.array([3], dtype=np.int32)
    assert of_one_row(table, np.array([0, -1, 2], dtype=np.int32), 4).tolist() == [12, PAD_SLOT, 14]
    assert of_one_row(table, np.array([], dtype=np.int32), 4).tolist() == []


def test_slots_that_do_not_exist() -> None:
    """Oracle: slots fit in 32 bits and lie in blocks that the table holds."""
    with pytest.raises(AssertionError, match="32 bits"):
        of_one_row(np.array([2**27], dtype=np.int32), np.array([0]), 16)
    with pytest.raises(AssertionError, match="does not hold"):
        of_one_row(np.array([-1], dtype=np.int32), np.array([0]), 16)
    with pytest.raises(IndexError):
        of_one_row(np.array([1], dtype=np.int32), np.array([16]), 16)
