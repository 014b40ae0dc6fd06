"""One layer's keys and values, read from the paged cache request by request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.attention.batch_plan import Group
from tp_engine.kernels.layer_kv import LayerKv, dequantise, scales_at
from tp_engine.plan import IntArray

# Which slots to read: a range where they are consecutive (a view, no copy), else their ids (B * keys,) int32.
SlotSelection: TypeAlias = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys that a group's calls read: of each request ``num_keys`` positions from ``first[b]`` (B,) on.

    These may begin before the first visible key (at its block's start), and may go on behind the request's end.  There
    they repeat the first one: another request's memory may hold NaN, which passes through a mask.  Unless ``is_exact``,
    a mask must hide both.
    """

    first: IntArray
    num_keys: int
    is_exact: bool
    selection: SlotSelection


def visible_keys(group: Group, window: int | None, metadata: AttentionMetadata, block_size: int) -> VisibleKeys:
    """What ``group`` reads in every layer of this ``window``."""
    first = np.zeros_like(group.seq_lens)
    if window is not None:
        np.maximum(group.seq_lens - group.query_len - window + 1, 0, out=first)
    if len(group.rows) == 1 and metadata.block_table.device.type == "cpu":
        row, num_keys = metadata.block_table[int(group.rows[0])], int(group.seq_lens[0] - first[0])
        run = _consecutive_slots(row, int(first[0]), num_keys, block_size)
        if run is not None:
            return VisibleKeys(first, num_keys, True, run)
    aligned = first // block_size * block_size
    counts = group.seq_lens - aligned
    num_keys = int(counts.max())
    is_exact = bool((counts == num_keys).all() and (aligned == first).all())
    return VisibleKeys(aligned, num_keys, is_exact, _slots(group, aligned, counts, metadata.block_table, block_size))


def _slots(group: Group, first: IntArray, counts: IntArray, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots (B x longest count,) int32 of ``counts[b]`` positions from ``first[b]`` on, which begin blocks."""
    device, num_keys = block_table.device, int(counts.max())
    num_blocks = -(-num_keys // block_size)
    tables = block_table.index_select(0, torch.from_numpy(group.rows).to(device))
    if first.any():
        columns = first[:, np.newaxis].astype(np.int64) // block_size + np.arange(num_blocks)
        columns = np.minimum(columns, tables.shape[1] - 1)  # beyond a request's end
        tables = tables.gather(1, torch.from_numpy(columns).to(device))
    starts = tables[:, :num_blocks, None] * block_size
    slots = (starts + torch.arange(block_size, dtype=torch.int32, device=device)).flatten(1)[:, :num_keys]
    if (counts < num_keys).any():
        count = torch.from_numpy(counts).to(device)[:, None]
        own = torch.arange(num_keys, dtype=torch.int32, device=device) < count
        slots = torch.where(own, slots, slots[:, :1])
    return slots.flatten()


def _consecutive_slots(block_table_row: torch.Tensor, first: int, num_keys: int, block_size: int) -> slice | None:
    """The slots of ``num_keys`` positions from ``first`` on as a range, if the blocks lie one after another."""
    first_block = first // block_size
    blocks = block_table_row[first_block : (first + num_keys - 1) // block_size + 1].numpy()
    if len(blocks) > 1 and not (np.diff(blocks) == 1).all():
        return None
    start = int(blocks[0]) * block_size + first % block_size
    return slice(start, start + num_keys)


class SlotReader:
    """Copies cached keys and values to a place of its own, reused by every call: new memory would cost page faults.

    What ``read`` returns is overwritten by the next ``read`` of the same ``part``.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def read(self, kv: LayerKv, part: int, selection: SlotSelection) -> torch.Tensor:
        """Keys (part 0) or values (part 1) at ``selection``: (keys, KV heads, head_dim), perhaps a view.

        A quantised cache is read as float32.
        """
        if kv.scales is not None:
            return self._read_quantised(kv.cache, part, selection, kv.scales[part])
        _, _, _, num_kv_heads, head_dim = kv.cache.shape
        slots = kv.cache[part].view(-1, num_kv_heads * head_dim)
        if isinstance(selection, slice):
            return slots[selection].view(-1, num_kv_heads, head_dim)
        rows = self._buffer(part, len(selection) * slots.shape[1], slots).view(len(selection), -1)
        torch.index_select(slots, 0, selection, out=rows)
        return rows.view(-1, num_kv_heads, head_dim)

    def _read_quantised(
        self, kv_cache: torch.Tensor, part: int, selection: SlotSelection, scales: torch.Tensor
    ) -> torch.Tensor:
        """``read`` with the part's ``scales`` (blocks, KV heads, block_size)."""
        values = self.read(LayerKv(kv_cache.view(torch.uint8)), part, selection).view(kv_cache.dtype)
        if isinstance(selection, slice):
            selection = torch.arange(selection.start, selection.stop, device=scales.device)
        return dequantise(values, scales_at(scales, selection))

    def _buffer(self, part: int, size: int, like: torch.Tensor) -> torch.Tensor:
        """The first ``size`` elements of the part's buffer, which grows as needed."""
        key = (part, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            with torch.inference_mode(False):  # else it could only be written in inference mode
                buffer = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size]
