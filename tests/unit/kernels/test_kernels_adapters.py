"""Products with adapters: Triton interpreted, compiled for GPUs, and C, against the twin."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases_adapters import SLOTS, cases_of
from tp_engine.cpu.library import native_library
from tp_engine.kernels.linear.adapters import TILE_ROWS, group_rows


@pytest.mark.parametrize("name", cases_of("native"))
def test_native(name: str) -> None:
    """Oracle: see ``check_adapters``."""
    if native_library() is None:
        pytest.skip("the compiled kernels cannot be had here")
    cases_of("native")[name]("cpu")


def test_rows_are_grouped_by_slot_in_order() -> None:
    """Oracle: by hand."""
    rows, tiles = group_rows(SLOTS)
    assert TILE_ROWS == 16
    assert rows.tolist() == [0, 2, *range(4, 21), 22, 3]
    assert tiles.tolist() == [[0, 16, 0], [16, 4, 0], [20, 1, 2]]
    none, no_tiles = group_rows(np.array([-1, -1]))
    assert len(none) == 0 and no_tiles.shape == (0, 3)
