"""The masks of a step plan as bytes; ``plan_codec`` draws the layout."""

from __future__ import annotations

import struct

from tp_engine.ipc.admission_codec import ALIGNMENT, INT, Buffer, Part, aligned, check_dtypes, check_room, split_ints
from tp_engine.plan import IntArray

_SIZES = struct.Struct("<II")


def encode_masks(rows: IntArray, masks: IntArray) -> list[Part]:
    """The parts of the section, to be joined; together they fill a multiple of ``ALIGNMENT``."""
    check_dtypes((rows, masks))
    assert masks.ndim == 2 and len(masks) == len(rows), f"masks {masks.shape} for {len(rows)} rows"
    num_bytes = _SIZES.size + rows.nbytes + masks.nbytes
    return [_SIZES.pack(*masks.shape), rows, masks, bytes(-num_bytes % ALIGNMENT)]


def decode_masks(buffer: Buffer, offset: int, total: int) -> tuple[IntArray, IntArray, int]:
    """``mask_rows`` (M,), ``masks`` (M, W) and the offset after them; ``PlanError`` if they end behind the plan."""
    check_room("masks", offset + _SIZES.size, total)
    num_rows, num_words = _SIZES.unpack_from(buffer, offset)
    end = aligned(offset + _SIZES.size + num_rows * (1 + num_words) * INT.itemsize)
    check_room("masks", end, total)
    rows, words = split_ints(buffer, offset + _SIZES.size, (num_rows, num_rows * num_words))
    return rows, words.reshape(num_rows, num_words), end
