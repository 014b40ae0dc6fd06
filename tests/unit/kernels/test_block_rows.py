"""Rows in blocks, in plain PyTorch: the twin of the kernels, and what products round on CPUs."""

from __future__ import annotations

import pytest
import torch

from tests.quantised.fake_rows import fake_rows
from tp_engine.apps.check.rounding import BLOCKS
from tp_engine.kernels.candidates import operation
from tp_engine.kernels.quantization.block_rows import BLOCK_FORMATS, encode_rows, has_blocks, round_rows, rounded_rows
from tp_engine.kernels.quantization.weights import code_values
from tp_engine.model_config.quantization import Blocks


@pytest.mark.parametrize("size", [64, 90])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_rows_are_those_of_compressed_tensors(kind: Blocks, size: int) -> None:
    """Oracle: compressed-tensors, bit by bit, over 30 powers of two; zeros, and what is beyond the largest scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, size, generator=generator) * (torch.randn(32, size, generator=generator) * 3).exp()
    x[1], x[2], x[3] = 0, x[2] * 1e-6, torch.arange(size) / 8 - 4
    scale = torch.tensor(2**-9) if kind == "nvfp4" else None
    assert torch.equal(rounded_rows(x, kind, scale), fake_rows(x, kind, scale))
    assert torch.equal(round_rows(x.bfloat16(), kind, scale), fake_rows(x.bfloat16().float(), kind, scale).bfloat16())


def test_each_row_by_each_scale() -> None:
    """Oracle: a row at a time with one scale: row 0 by scales 0 and 1, row 1 by 2 and 3."""
    x, scales = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)), torch.tensor([1e-3, 2e-3, 1e-2, 1e-4])
    (codes, of_groups), values = encode_rows(x, "nvfp4", scales), rounded_rows(x, "nvfp4", scales)
    for number, scale in enumerate(scales):
        row = x[number // 2 : number // 2 + 1]
        expected, expected_scales = encode_rows(row, "nvfp4", scale)
        assert torch.equal(codes[number], expected[0]) and torch.equal(of_groups[number], expected_scales[0])
        assert torch.equal(values[number], rounded_rows(row, "nvfp4", scale)[0])
    assert rounded_rows(x[:0], "nvfp4", scales[:0]).shape == (0, 40)


@pytest.mark.parametrize(("kind", "error"), [("nvfp4", 0.095), ("mxfp4", 0.112), ("mxfp8", 0.027)])
def test_what_rounding_costs(kind: Blocks, error: float) -> None:
    """Oracle: the figures of docs/design/gpu_kernels.md, for normally distributed rows."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(4.5 / (6 * 448)) if kind == "nvfp4" else None
    assert ((rounded_rows(x, kind, scale) - x).norm() / x.norm()).item() == pytest.approx(error, abs=0.001)


def test_codes_of_a_few_numbers() -> None:
    """Oracle: by hand: 6 is the largest, so the scale is 1, 0.5 of 1 is code 1, 2.5 and 3.5 go to the even codes of
    2 and 4, and -6 is 15; without a number a group's scale is 1 / 128, of NaN."""
    x = torch.zeros(2, 32)
    x[0, :8] = torch.tensor([0.5, 1, 2.5, 3.5, 5, 0.25, -6, -0.1])
    x[1, 3] = torch.nan
    codes, scales = encode_rows(x, "mxfp4")
    assert codes[0, :4].tolist() == [0x21, 0x64, 0x06, 0x8F] and codes.shape == (2, 16)
    assert scales.tolist() == [[127], [255]] and not codes[1].any() and rounded_rows(x, "mxfp4")[1].isnan().all()
    assert code_values("e2m1", codes)[0, :8].tolist() == [0.5, 1, 2, 4, 4, 0, -6, 0]


def test_which_candidates_take_blocks() -> None:
    """Oracle: the formats: whole blocks of the weight's kind, of rows that are rounded, and bfloat16."""
    table, device = operation("quantised_linear"), torch.device("cpu")
    shape: dict[str, int | str] = {
        "in": 64, "out": 64, "type": "bfloat16", "codes": "e2m1", "scales": "float8_e4m3fn", "group": 16,
        "row_block": 1, "zeros": 0, "factors": 1, "parts": 0, "rows": "nvfp4",
    }  # fmt: skip
    candidate = next(one for one in table.candidates if one.name.startswith("blocks"))
    assert candidate.why_not(shape, device) == "it needs a GPU"
    assert candidate.why_not({**shape, "rows": "whole"}, device) == "rows are not rounded in blocks"
    for change in ({"group": 8}, {"type": "float16"}, {"rows": "mxfp4"}, {"codes": "e4m3"}):
        assert "same whole blocks" in str(candidate.why_not({**shape, **change}, device))
    weight = table.weights(shape, device, torch.Generator().manual_seed(0))
    assert weight.rows is not None and weight.rows.kind == "nvfp4" and has_blocks(weight, "nvfp4")
    assert table.default(shape, device)[-1][1] == "dequantise"


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_the_check_expects_as_large_an_error(kind: Blocks) -> None:
    """Oracle: the error of compressed-tensors' rounding; ``tp-engine check`` has a bound by formulas of its own."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    fake = fake_rows(x, kind, torch.tensor(4.5 / (6 * 448)) if kind == "nvfp4" else None)
    assert ((BLOCKS[kind](x) - x).norm() / (fake - x).norm()).item() == pytest.approx(1, abs=0.1)
