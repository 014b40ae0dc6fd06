"""One layer's keys and values, read from the paged cache request by request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.attention.batch_plan import Group
from tp_engine.plan import IntArray

# Which slots to read: a range where they are consecutive (a view, no copy), else their ids (B * keys,) int32.
SlotSelection: TypeAlias = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys that a group's queries can see: request b's ``num_keys`` positions from ``first[b]`` (B,) on.

    Positions beyond a request's end (if it ``is_padded``) repeat its first visible key: never another request's
    memory, whose NaN would pass through a mask.
    """

    first: IntArray
    num_keys: int
    is_padded: bool
    selection: SlotSelection


def visible_keys(group: Group, window: int | None, metadata: AttentionMetadata, block_size: int) -> VisibleKeys:
    """What ``group`` reads in every layer of this ``window``."""
    first = np.zeros_like(group.seq_lens)
    if window is not None:
        np.maximum(group.seq_lens - group.query_len - window + 1, 0, out=first)
    counts = group.seq_lens - first
    num_keys, is_padded = int(counts.max()), bool(counts.min() < counts.max())
    selection: SlotSelection | None = None
    if len(group.rows) == 1 and metadata.block_table.device.type == "cpu":
        row = metadata.block_table[int(group.rows[0])]
        selection = _consecutive_slots(row, int(first[0]), num_keys, block_size)
    if selection is None:
        selection = _slots(group, first, num_keys, metadata.block_table, block_size)
    return VisibleKeys(first, num_keys, is_padded, selection)


def _slots(group: Group, first: IntArray, num_keys: int, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots (B * num_keys,) int32 of the positions from ``first`` (B,) on."""
    device = block_table.device
    rows, start, end = (torch.from_numpy(column).to(device) for column in (group.rows, first, group.seq_lens))
    positions = start[:, None] + torch.arange(num_keys, dtype=torch.int32, device=device)
    positions = torch.where(positions < end[:, None], positions, start[:, None])
    blocks = block_table.index_select(0, rows).gather(1, (positions // block_size).long())
    return (blocks * block_size + positions % block_size).flatten()


def _consecutive_slots(block_table_row: torch.Tensor, first: int, num_keys: int, block_size: int) -> slice | None:
    """The slots of ``num_keys`` positions from ``first`` on as a range, if the blocks lie one after another."""
    first_block = first // block_size
    blocks = block_table_row[first_block : (first + num_keys - 1) // block_size + 1].numpy()
    if len(blocks) > 1 and not (np.diff(blocks) == 1).all():
        return None
    start = int(blocks[0]) * block_size + first % block_size
    return slice(start, start + num_keys)


def read_slots(cache: torch.Tensor, selection: SlotSelection) -> torch.Tensor:
    """Rows (keys, KV heads, head_dim) of ``cache`` (blocks, block_size, KV heads, head_dim)."""
    _, _, num_kv_heads, head_dim = cache.shape
    slots = cache.view(-1, num_kv_heads * head_dim)
    rows = slots[selection] if isinstance(selection, slice) else slots.index_select(0, selection)
    return rows.view(-1, num_kv_heads, head_dim)
