"""Which linear layers the Triton kernel for one row takes."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.kernel_harness import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("rows", "columns", "is_gated", "is_taken"),
    [
        (64, 1024, False, True),
        (64, 1000, False, False),
        (63, 4096, False, False),
        (65, 4096, True, False),
        (66, 4096, True, True),
    ],
)
def test_what_is_taken(rows: int, columns: int, is_gated: bool, is_taken: bool) -> None:
    """Oracle: whole blocks only."""
    from tp_engine.kernels.linear.one_row_linear_triton import takes_weight

    assert takes_weight(torch.empty(rows, columns, device="meta"), is_gated=is_gated) is is_taken
