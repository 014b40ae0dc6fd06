"""Row ranges small enough that what is computed for them stays in a CPU's cache, or in little device memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_CPU_ELEMENTS = 1 << 16
_DEVICE_ELEMENTS = 1 << 23


def row_chunks(num_rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) over ``num_rows`` rows of ``width`` elements, at least one row each."""
    step = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS) // width)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)
