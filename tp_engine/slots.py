"""Where a token's K/V lies in the paged cache.

A slot is ``block_id * block_size + offset``.  With block_size 4 and the block table [5, 2]::

    position    0  1  2  3 |  4  5  6  7
    block             5    |        2
    slot       20 21 22 23 |  8  9 10 11
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.plan import PAD_SLOT, IntArray

SlotArray: TypeAlias = npt.NDArray[np.int64]
AnyIntArray: TypeAlias = npt.NDArray[np.integer[Any]]

MAX_SLOT = int(np.iinfo(np.int32).max)


def slots_for(
    block_tables: IntArray, row_index_per_token: AnyIntArray, positions: AnyIntArray, block_size: int
) -> SlotArray:
    """Slots (..., N) int64 of N tokens of many rows.

    ``block_tables`` (..., rows, blocks per row), such as one for each group of layers; token i is at ``positions[i]``
    (N,) of row ``row_index_per_token[i]`` (N,).  A negative position is padding and gets ``PAD_SLOT``.  Every slot fits
    in 32 bits, which kernels rely on.
    """
    blocks = block_tables[..., row_index_per_token, positions // block_size].astype(np.int64)
    slots: SlotArray = blocks * block_size + positions % block_size
    if not slots.size:
        return slots
    padding = positions < 0
    if padding.any():
        slots[..., padding] = 0
    assert slots.max() <= MAX_SLOT, f"slot {slots.max()} does not fit in 32 bits"
    assert slots.min() >= 0, "a token lies in a block that its table does not hold"
    slots[..., padding] = PAD_SLOT
    return slots


def slot_mapping(block_table_row: IntArray, positions: AnyIntArray, block_size: int) -> SlotArray:
    """Slots (N,) int64 of N tokens of one row, see ``slots_for``."""
    return slots_for(block_table_row[np.newaxis], np.zeros_like(positions), positions, block_size)
