"""Linear layers of a few rows as a Triton kernel: interpreted, compiled, and chosen for the layers that suit it."""

from __future__ import annotations

import re

import pytest
import torch

from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet
from tp_engine.errors import ConfigError
from tp_engine.layers.formats import few_rows

CASES = "kernel_cases_few_rows_linear"
# What a program may use on GPUs of capability 8.6, 8.9 and 12.0, the least of those that Triton supports.
LEAST_SHARED_MEMORY = 99 << 10
pytestmark = needs_triton


def test_interpreted_kernels() -> None:
    """Oracle: float64; the error is at most twice that of the twin in the same precision."""
    interpreted(CASES)


@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU; the rule of dependent launch: before the wait, which every
    program comes to once, weights are read or sent for, and nothing is written."""
    for kernel in compile_cases(CASES, capability):
        ptx = kernel.asm["ptx"]
        assert kernel.metadata.shared <= LEAST_SHARED_MEMORY, (kernel.metadata.shared, kernel.name)
        assert ptx.count("griddepcontrol.wait") == (1 if capability >= 90 else 0)
        if capability < 90:
            continue
        before = ptx.partition("griddepcontrol.wait")[0]
        assert "ld.global" in before and not re.search(r"\bst\.global|\batom\.|\bred\.|cp\.async|\$L__BB", before)
        assert "wgmma" in ptx or "tcgen05.mma" in ptx or "mma.sync" in ptx


@pytest.mark.parametrize(
    ("shape", "is_gated", "is_taken"),
    [
        ((64, 1024), False, True),
        ((96, 1024), False, False),
        ((128, 1056), False, True),
        ((128, 1040), False, False),
        ((64, 1024), True, False),
        ((128, 1024), True, True),
    ],
)
def test_what_is_taken(shape: tuple[int, int], is_gated: bool, is_taken: bool) -> None:
    """Oracle: whole tiles of 64 outputs, of gate and of up; blocks of 32 columns."""
    from tp_engine.kernels.linear.few_rows_linear_triton import takes_weight

    assert takes_weight(torch.empty(shape, device="meta"), is_gated=is_gated) is is_taken


@pytest.mark.parametrize("num_multiprocessors", [1, 20, 132, 148])
@pytest.mark.parametrize("shape", [(64, 32), (1024, 2880), (1024, 3072), (24576, 4096), (4096, 11008), (5120, 25600)])
def test_splits_cover_all_columns_once(shape: tuple[int, int], num_multiprocessors: int) -> None:
    """Oracle: arithmetic; no split is empty, and there are at most two programs for each multiprocessor, or one split.

    Sizes follow from the padded number of rows, so that every step of this size adds up in the same order.
    """
    from tp_engine.kernels.linear.few_rows_linear_triton import TILES, linear_sizes

    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    for (rows, tiles), fewest in zip(TILES, (1, *(rows + 1 for rows, _ in TILES[:-1])), strict=True):
        found = linear_sizes(weight, rows, num_multiprocessors)
        assert found == linear_sizes(weight, fewest, num_multiprocessors) and found.rows == rows
        assert (found.num_splits - 1) * found.split_in < shape[1] <= found.num_splits * found.split_in
        assert found.split_in % found.tiles.block_in == shape[1] % found.tiles.block_in == 0
        num_tiles = shape[0] // tiles.block_out
        assert found.num_splits <= tiles.most_splits
        assert found.num_splits == 1 or found.num_splits * num_tiles <= 2 * num_multiprocessors


def make(by: str, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> few_rows.FewRowsLinear | None:
    monkeypatch.setenv("TP_ENGINE_FEW_ROWS", by)
    return few_rows.choose_few_rows(weight, None)


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the table, which has one row only as long as nothing is measured; and the switch."""
    weight = torch.empty(128, 1024, dtype=torch.bfloat16)
    taken = {by: make(by, weight, monkeypatch) for by in ("table", "triton", "library")}
    assert taken["library"] is None
    table, triton = taken["table"], taken["triton"]
    assert table is not None and [rows for rows in (0, 1, 2, 256, 257) if table.fuses(rows)] == [1]
    assert triton is not None and [rows for rows in (0, 1, 2, 256, 257) if triton.fuses(rows)] == [1, 2, 256]
    monkeypatch.setattr(few_rows, "MOST_ROWS", ((1024, 8), (128 * 1024, 64), (1 << 62, 1)))
    measured = make("table", weight, monkeypatch)
    assert measured is not None and [rows for rows in (1, 64, 65) if measured.fuses(rows)] == [1, 64]
    odd = make("triton", torch.empty(100, 96, dtype=torch.bfloat16), monkeypatch)
    vocabulary = make("triton", torch.empty(1 << 17, 128, dtype=torch.bfloat16, device="meta"), monkeypatch)
    assert odd is vocabulary is None
    half = make("triton", weight.half(), monkeypatch)
    assert half is not None and half.norms(1) and half.fuses(2) and not half.norms(2)
    with pytest.raises(ConfigError, match="TP_ENGINE_FEW_ROWS is 'best'"):
        make("best", weight, monkeypatch)
